"""Generation of text with a trained model.

engine is the engine that generates, and calculator is the calculator that it calls. chat has what the chat in the
terminal and the chat page share, and chat_server is the server of the chat page. scripts/chat_cli.py and
scripts/chat_web.py start the chats. Modules of this folder may import models, data, nvfp4 and the flat modules of
nanochat_fp4.
"""
