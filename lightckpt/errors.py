"""Exceptions of lightckpt: one base, one class per thing a caller can do about it."""


class CheckpointError(Exception):
    """Base of every error that lightckpt raises about a checkpoint."""


class MediaError(CheckpointError):
    """The media failed in this call. The version is lost, a later one may succeed."""


class MediaLostError(MediaError):
    """The media is lost to this process. It commits nothing more; its last version stands."""


class NoSpaceError(CheckpointError):
    """The version does not fit. Make room, then save again; nothing was overwritten."""


class NotFoundError(CheckpointError):
    """No such store, or it holds no such version."""


class BusyError(CheckpointError):
    """Another process holds the store, or readers its slots: the message says who, or how many."""


class FormatError(CheckpointError):
    """No store, another format version, cut short, or metadata that are damaged."""


class CorruptError(CheckpointError):
    """Data differ from their checksums. The message names the tensors."""


class AccessError(CheckpointError):
    """The path may not be read or written by this user."""


class StructureError(CheckpointError):
    """The version holds the state of another model or optimizer. The message names what differs."""


class UnsafeStateError(CheckpointError):
    """A value has no exact and safe encoding. The message has its path; see ``allow_pickle``."""


class WaitTimeoutError(CheckpointError, TimeoutError):
    """A copy or a commit took longer than ``timeout`` seconds. Training state is untouched."""


class CheckpointWarning(UserWarning):
    """A version was not made, or was given up; training goes on and older versions stand."""
