"""The code that runs inside the sandbox for model-written code. execution.py starts this folder as a script.

__main__ is the supervisor, judge has the processes of the judge and of the program, and layers has the calls to the
kernel. These modules use only the standard library, and import each other without the package's name.
"""
