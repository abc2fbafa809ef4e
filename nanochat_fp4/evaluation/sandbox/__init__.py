"""The inside of the sandbox for model-written code. execution.py starts this folder as a script.

__main__ is the supervisor, judge has the judge and the program's process, layers holds the calls to the kernel.
These modules use the standard library alone and import each other without the package's name.
"""
