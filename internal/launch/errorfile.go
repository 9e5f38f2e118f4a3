package launch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/session"
)

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
