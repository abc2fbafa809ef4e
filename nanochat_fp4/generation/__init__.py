"""Text from a trained model: the engine, the calculator that it calls, what chats share, and the chat page's server.

scripts/chat_cli.py and scripts/chat_web.py start these. Modules of this folder may import models, data, nvfp4 and the
flat modules of nanochat_fp4.
"""
