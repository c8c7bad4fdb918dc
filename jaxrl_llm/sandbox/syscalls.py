"""The system calls a jailed program may not make, as the BPF program that bubblewrap hands to the kernel."""

import errno
import os
import socket

from jaxrl_llm.types import UserError

# Ways to look into or steer other processes, to reach seldom reviewed kernel code, or to change what is mounted. They
# answer EPERM; calls of another architecture kill the process.
_DENIED = """\
acct add_key bpf clock_adjtime clock_settime delete_module fanotify_init finit_module fsconfig fsmount fsopen fspick
init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl
open_by_handle_at open_tree perf_event_open personality pidfd_getfd pidfd_open pivot_root process_madvise
process_vm_readv process_vm_writev ptrace quotactl reboot request_key set_mempolicy setns settimeofday swapoff swapon
syslog umount2 unshare uselib userfaultfd vhangup vmsplice
"""
# Of sockets only these families: a network namespace does not contain AF_VSOCK, AF_ALG and others.
_FAMILIES = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
_MOST_FAMILIES = 64


def filter_program() -> bytes:
    """The filter, for `bwrap --seccomp`. Raises UserError without pyseccomp or the library it opens."""
    try:
        import pyseccomp  # an extra, and it looks for libseccomp as it is imported
    except (ImportError, RuntimeError, OSError) as error:
        raise UserError(
            f"the sandbox needs pyseccomp and libseccomp ({error}); pip install 'jaxrl_llm[code]' (and, where Debian "
            "lacks it, apt-get install libseccomp2)"
        ) from None
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    deny = pyseccomp.ERRNO(errno.EPERM)
    for name in _DENIED.split():
        # A name that this libseccomp does not know, or another architecture's, is no call that could be made here.
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:
            rules.add_rule(deny, name)
    for family in range(_MOST_FAMILIES):
        if family not in _FAMILIES:
            rules.add_rule(deny, "socket", pyseccomp.Arg(0, pyseccomp.EQ, family))
    with os.fdopen(os.memfd_create("seccomp"), "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
