"""ptrace(2), by which a debugger holds processes and is told how they end."""

import ctypes

# <linux/ptrace.h> and <linux/wait.h>
CONT, DETACH, SEIZE, INTERRUPT, WALL = 7, 17, 0x4206, 0x4207, 0x40000000
# Its result is 0, or -1 with ctypes.get_errno().
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
