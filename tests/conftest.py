"What every test needs before it starts."
import signal

# A shell that starts pytest in the background (pytest & in a script) has it ignore Ctrl-C, and so would every process that the tests start and then interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
