"""What can be wrong with a kernel, each as an exception of its own."""


class EmulatorError(Exception):
    """A kernel broke a rule; the message names the kernel."""


class CompileError(EmulatorError):
    """The compiler refused the source: a wrong address space, among others. The message is the
    compiler's.
    """


class LaunchError(EmulatorError, ValueError):
    """The call asks for what no device has: too many threads in a threadgroup, too much threadgroup
    memory.
    """


class MemoryFault(EmulatorError):
    """A thread read or wrote outside a buffer, wrote what it must not write, or at a misaligned
    address.
    """


class BarrierError(EmulatorError):
    """Not all threads of a threadgroup, or of a simdgroup, came to the same barrier or simdgroup
    operation.
    """


class UnwrittenOutput(EmulatorError):
    """Elements of an output that no thread wrote."""


class OrderDependence(EmulatorError):
    """Another order of the threads gave other results: a barrier is missing, or memory was read
    before written.
    """


class DataRace(OrderDependence):
    """Two threads used one place, one of them to write it, and no barrier that orders this memory
    lies between. Whether the values differ does not matter.
    """


class UnwrittenRead(OrderDependence):
    """A thread read threadgroup memory that no thread of its threadgroup had written: not at all,
    or not yet, for want of a barrier.
    """


class UndefinedResult(EmulatorError):
    """A value that neither C++ nor a GPU defines: a float out of an integer's range, a shuffle from
    a lane that is not there.
    """


class ForbiddenWrite(EmulatorError):
    """A write to an input outside the ranges that may be written, or one that would be lost on a
    device.
    """


class TimeLimit(EmulatorError):
    """The kernel did not end in time."""
