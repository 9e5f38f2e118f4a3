package launch

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// unblocked makes this thread one that blocks no signal, until the result is
// called: a process that is started by it inherits its mask. Who started the
// trainer may have blocked some, and a worker that blocks SIGTERM neither saves
// nor ends by it.
func unblocked() (restore func() error, err error) {
	runtime.LockOSThread()
	var was unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &unix.Sigset_t{}, &was); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("unblock the signals of the workers: %w", err)
	}
	return func() error {
		defer runtime.UnlockOSThread()
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &was, nil); err != nil {
			return errors.Join(errors.New("block the trainer's signals again"), err)
		}
		return nil
	}, nil
}
