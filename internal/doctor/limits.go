package doctor

import (
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/bytesize"
)

// What jobs of ordinary size need. Smaller jobs run with less.
const (
	enoughFiles     = 4096
	enoughProcesses = 2048
	enoughShared    = 1 << 30
)

func (e *examination) limits(ctx context.Context) {
	e.check(ctx, "limits.files", func(context.Context) answer {
		return limit(unix.RLIMIT_NOFILE, enoughFiles, "open files", "raise it: ulimit -n, LimitNOFILE of the service, or docker run --ulimit nofile=")
	})
	e.check(ctx, "limits.processes", func(context.Context) answer {
		return limit(unix.RLIMIT_NPROC, enoughProcesses, "processes of this user", "raise it: ulimit -u, or LimitNPROC of the service")
	})
	e.check(ctx, "limits.locked", func(context.Context) answer { return locked("/sys/class/infiniband") })
	e.check(ctx, "limits.memory", func(context.Context) answer { return groupMemory("/proc/self/cgroup", "/sys/fs/cgroup") })
	e.check(ctx, "limits.pids", func(context.Context) answer { return groupPIDs("/proc/self/cgroup", "/sys/fs/cgroup") })
	e.check(ctx, "stacks", func(context.Context) answer { return stacks("/proc/sys/kernel/yama/ptrace_scope", os.Geteuid()) })
}

func limit(resource int, enough uint64, what, do string) answer {
	var r unix.Rlimit
	if err := unix.Getrlimit(resource, &r); err != nil {
		return notChecked("", "limit of %s: %v", what, err)
	}
	if r.Cur == unix.RLIM_INFINITY {
		return ok("%s: no limit", what)
	}
	if r.Cur < enough {
		return warning(do, "%s: %d, jobs with many ranks need %d", what, r.Cur, enough)
	}
	return ok("%s: %d", what, r.Cur)
}

// locked checks the limit of locked memory, which RDMA needs and CUDA does not.
func locked(rdma string) answer {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return notChecked("", "limit of locked memory: %v", err)
	}
	if r.Cur == unix.RLIM_INFINITY {
		return ok("locked memory: no limit")
	}
	if cards, err := os.ReadDir(rdma); err == nil && len(cards) > 0 {
		return warning("raise it: ulimit -l unlimited, LimitMEMLOCK=infinity of the service, or docker run --ulimit memlock=-1", "locked memory: %s, but NCCL locks more for RDMA cards", bytesize.Text(r.Cur))
	}
	return ok("locked memory: %s, without RDMA cards", bytesize.Text(r.Cur))
}

// groupMemory checks how much memory the control groups of this process allow.
func groupMemory(groups, root string) answer {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return notChecked("", "memory of this machine: %v", err)
	}
	total := info.Totalram * uint64(info.Unit)
	bound, err := groupLimit(groups, root, "memory", "memory.max", "memory.limit_in_bytes")
	switch {
	case err != nil:
		return notChecked("", "memory limit of the control group: %v", err)
	case bound >= total:
		return ok("%s of memory, no lower limit by control groups", bytesize.Text(total))
	}
	return ok("%s of memory by control groups, of %s in the machine; staged saves count", bytesize.Text(bound), bytesize.Text(total))
}

func groupPIDs(groups, root string) answer {
	bound, err := groupLimit(groups, root, "pids", "pids.max", "pids.max")
	switch {
	case err != nil:
		return notChecked("", "limit of processes of the control group: %v", err)
	case bound == math.MaxUint64:
		return ok("processes of the control group: no limit")
	case bound < enoughProcesses:
		return warning("raise it: docker run --pids-limit, podPidsLimit of the kubelet, TasksMax of the service", "processes and threads of the control group: %d, jobs with many ranks need %d", bound, enoughProcesses)
	}
	return ok("processes and threads of the control group: %d", bound)
}

// groupLimit returns the lowest limit of the control groups of this process and
// of their parents, in version 2 or 1. It returns the largest number if there is
// none.
func groupLimit(groups, root, controller, file, fileOfV1 string) (uint64, error) {
	lowest := uint64(math.MaxUint64)
	lines, err := os.ReadFile(groups)
	if errors.Is(err, fs.ErrNotExist) {
		return lowest, nil
	}
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(lines)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3) // hierarchy:controllers:path
		if len(part) < 3 {
			continue
		}
		dir, name := root, file
		if part[1] != "" {
			if part[1] != controller {
				continue
			}
			dir, name = filepath.Join(root, controller), fileOfV1
		}
		for path := part[2]; ; path = filepath.Dir(path) {
			text, err := os.ReadFile(filepath.Join(dir, path, name))
			// A group without the file, or with "max" in it, has no limit of its
			// own.
			if n, perr := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil && perr == nil {
				lowest = min(lowest, n)
			}
			if path == "/" || path == "." {
				break
			}
		}
	}
	return lowest, nil
}

// stacks checks whether the Python stacks of a hanging worker can be read.
func stacks(scopeFile string, uid int) answer {
	tool, err := exec.LookPath("py-spy")
	if err != nil {
		return warning("pip install py-spy, where workers are Python", "no py-spy: the Python stack of a hanging worker cannot be read")
	}
	text, err := os.ReadFile(scopeFile)
	scope := strings.TrimSpace(string(text))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ok("%s, and ptrace is not restricted", tool)
	case err != nil:
		return notChecked("", "%s, but it is unknown whether it may trace: %v", tool, err)
	case scope != "0" && uid != 0, scope == "3":
		return warning("sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE", "%s, but kernel.yama.ptrace_scope is %s: it may not look at the workers", tool, scope)
	}
	return ok("%s, kernel.yama.ptrace_scope is %s", tool, scope)
}
