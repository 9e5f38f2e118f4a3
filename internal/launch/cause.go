package launch

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/retry"
)

// failure is the failed end of one rank's process.
type failure struct {
	process.Exit
	told    told
	at      int64 // when the process ended, in unix seconds
	stopped bool  // another failure had ended the group before
}

// victim reports whether it ended without an error report after another failure.
func (f failure) victim() bool { return f.stopped && f.told.message == "" }

// itself reports whether the rank failed by itself: neither the signals that end a group nor the
// end of another rank explain its end. tail is the end of its output.
func (f failure) itself(tail []string) bool {
	byStop := f.Signal == "SIGTERM" || f.Signal == "SIGKILL" || f.Code == 128+int(syscall.SIGTERM) || f.Code == 128+int(syscall.SIGKILL)
	return !(f.victim() && byStop) && !blame.Blameless(f.String(), tail)
}

func (f failure) String() string {
	if f.told.message == "" {
		return f.Exit.String()
	}
	return f.Exit.String() + ": " + f.told.message
}

// handoffEnd tracks why a hand-off ended if no worker's exit is to blame. Workers
// whose reports are rejected end too, and the trainer may see their exits first.
type handoffEnd struct {
	failed *FailedError
	ended  []int        // ranks whose end is the reason, if they ended well
	well   map[int]bool // ranks that ended well before any failed
	worse  bool         // a rank has failed
}

// exited records exits, in order.
func (h *handoffEnd) exited(e process.Exit) {
	if h.worse = h.worse || e.Failed(); h.worse {
		return
	}
	if h.well == nil {
		h.well = map[int]bool{}
	}
	h.well[e.Rank] = true
}

// from converts a hand-off error to a FailedError.
func (h *handoffEnd) from(err error) *FailedError {
	why := &FailedError{Rank: -1, Cause: err.Error()}
	if errors.As(err, new(*retry.RefusedError)) {
		why.Kind = blame.Infrastructure
		h.failed = why
	}
	if uneven := (*handoff.UnevenError)(nil); errors.As(err, &uneven) {
		h.failed, h.ended = why, uneven.Ended
	}
	return why
}

// or returns the cause of an attempt's end, given a cause that may have been seen
// first.
func (h *handoffEnd) or(cause *FailedError) *FailedError {
	if h.failed == nil || slices.ContainsFunc(h.ended, func(rank int) bool { return !h.well[rank] }) {
		return cause
	}
	return h.failed
}

// rootCause returns the earliest failure, by the workers' timestamps in whole
// seconds, else by the order of their ends. Victims come last.
func rootCause(failures []failure) failure {
	when := func(f failure) int64 {
		if f.told.at > 0 {
			return f.told.at
		}
		return f.at
	}
	order := slices.SortedStableFunc(slices.Values(failures), func(a, b failure) int {
		switch {
		case a.victim() != b.victim() && a.victim():
			return 1
		case a.victim() != b.victim():
			return -1
		}
		return cmp.Compare(when(a), when(b))
	})
	return order[0]
}

// caused puts the cause of ctx's end in front of an error that follows from it,
// such as a log that does not answer while the job ends. An exhausted budget is a
// cause of its own.
func caused(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if err == nil || cause == nil || errors.Is(err, cause) || errors.As(err, new(*FailedError)) {
		return err
	}
	return errors.Join(cause, err)
}

// Bounds in bytes. An event has to fit the log, where a byte may take six. A
// traceback of any length must not keep its group from restarting.
const (
	maxErrorFile = 16 << 20 // read from an error file
	maxTraceback = 64 << 10 // kept in the log: the end, where the error is
)

// told is a worker's report of its own failure, in the file format of
// torchelastic's record decorator:
//
//	{"message": {"message": …, "extraInfo": {"py_callstack": …, "timestamp": "<unix>"}}}
//	{"message": "…"}
type told struct {
	message   string // at most MaxMessage
	traceback string // at most maxTraceback
	at        int64  // unix seconds; 0 if missing
}

// errorFile returns what rank has reported, if anything.
func (w *watch) errorFile(rank int) told {
	data, err := readErrorFile(w.group.File(rank, "error.json"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // most workers write none
		w.log.Warn("error file not readable", "rank", rank, "error", err)
	}
	return parseErrorFile(data)
}

// readErrorFile reads the file that a worker has put at path. The worker may have
// put anything there: readErrorFile waits only for a regular file, and follows no
// link, because a hanging disk may be behind it.
func readErrorFile(path string) (data []byte, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, syscall.ELOOP) {
		return nil, fmt.Errorf("the error file %s is a link; write the file itself", path)
	}
	if err != nil {
		return nil, fmt.Errorf("read the error file: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read the error file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("the error file %s is not a regular file but %s", path, info.Mode())
	}
	if data, err = io.ReadAll(io.LimitReader(f, maxErrorFile+1)); err != nil {
		return nil, fmt.Errorf("read the error file: %w", err)
	}
	if len(data) > maxErrorFile {
		return data[:maxErrorFile], fmt.Errorf("the error file %s has more than %d bytes; only its beginning is used", path, maxErrorFile)
	}
	return data, nil
}

func parseErrorFile(data []byte) told {
	var full struct {
		Message struct {
			Message   string
			ExtraInfo struct {
				Callstack string `json:"py_callstack"`
				Timestamp string
			}
		}
	}
	if json.Unmarshal(data, &full) == nil {
		m := full.Message
		at, _ := strconv.ParseInt(m.ExtraInfo.Timestamp, 10, 64) // 0 if it is not a number
		return told{session.Beginning(m.Message, session.MaxMessage), session.End(m.ExtraInfo.Callstack, maxTraceback), at}
	}
	var plain struct{ Message string }
	if json.Unmarshal(data, &plain) == nil {
		return told{message: session.Beginning(plain.Message, session.MaxMessage)}
	}
	return told{message: session.Beginning(string(data), session.MaxMessage)}
}
