package logs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/ckptstore/ckptstore/internal/beneath"
)

// tailed reads one output that may be written and rotated meanwhile.
type tailed struct {
	key  key
	path string
	root beneath.Root // no symbolic link is followed below it
	line Line

	begun bool
	f     *os.File // the file being read
	in    *bufio.Reader
	part  []byte // of a line whose end is not written yet
}

// longest is the maximum size of a line: a piece of output and its time.
const longest = longestText + 64

func (t *tailed) close() {
	if t.f != nil {
		_ = t.f.Close() // opened only for reading
		t.f, t.in, t.line.Text = nil, nil, nil
	}
}

// openIf opens a file; it returns nil if there is none.
func (t *tailed) openIf(path string) (*os.File, error) {
	f, err := t.root.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read output: %w", err)
	}
	return f, nil
}

func (t *tailed) read(f *os.File) {
	t.close()
	t.f, t.in = f, bufio.NewReaderSize(f, longest)
}

// begin opens the oldest file.
func (t *tailed) begin() error {
	t.begun = true
	// Open the current file first: if it is rotated now, it becomes the previous
	// one.
	now, err := t.openIf(t.path)
	if err != nil {
		return err
	}
	old, err := t.openIf(t.path + before)
	if err != nil {
		return errors.Join(err, closeAll(now))
	}
	switch {
	case old != nil && (now == nil || !same(old, now)):
		t.read(old)
		return closeAll(now)
	case now != nil:
		t.read(now)
		return closeAll(old)
	}
	t.begun = false // between two files: the next look finds them
	return nil
}

func closeAll(f *os.File) error {
	if f == nil {
		return nil
	}
	return f.Close()
}

func same(a, b *os.File) bool {
	x, err := a.Stat()
	y, err2 := b.Stat()
	return err == nil && err2 == nil && os.SameFile(x, y)
}

// next makes the next line of the output t.line. It returns false at the current
// end.
func (t *tailed) next() (bool, error) {
	if !t.begun {
		if err := t.begin(); err != nil {
			return false, err
		}
	}
	for t.f != nil {
		// Check before the end is seen: then everything in the file has been
		// read.
		rotated, err := t.rotated()
		if err != nil {
			return false, err
		}
		piece, err := t.in.ReadSlice('\n')
		t.part = append(t.part, piece...)
		switch {
		case err == nil:
			t.take()
			return true, nil
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case !errors.Is(err, io.EOF):
			return false, fmt.Errorf("read output: %w", err)
		case !rotated:
			return false, nil
		}
		newer, err := t.openIf(t.path)
		if err != nil || newer == nil { // it is being rotated again
			return false, err
		}
		t.read(newer)
		if len(t.part) > 0 { // a crash cut it off
			t.take()
			return true, nil
		}
	}
	return false, nil
}

// rotated reports whether another file has replaced the file being read. It is
// not called while the buffer holds unread data.
func (t *tailed) rotated() (bool, error) {
	if t.in.Buffered() > 0 {
		return false, nil
	}
	info, err := t.f.Stat()
	if err != nil {
		return false, fmt.Errorf("read output: %w", err)
	}
	now, err := t.root.Stat(t.path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read output: %w", err)
	}
	return !os.SameFile(info, now), nil
}

// rest makes t.line the last part without an end, if there is one.
func (t *tailed) rest() bool {
	if len(t.part) == 0 {
		return false
	}
	t.take()
	return true
}

// take makes the collected bytes t.line. A line without a time gets the time of
// the previous line.
func (t *tailed) take() {
	whole := bytes.TrimSuffix(t.part, []byte{'\n'})
	at, text, ok := parseLine(whole)
	if !ok {
		at = t.line.Time
	}
	t.line = Line{Attempt: t.key.attempt, Rank: t.key.rank, Stream: t.key.stream, Time: at, Text: bytes.Clone(text)}
	t.part = t.part[:0]
}

// skipTo seeks to the place where n lines are left of the whole output.
func (t *tailed) skipTo(n int) error {
	now, err := t.openIf(t.path)
	if err != nil || now == nil {
		return err
	}
	at, have, err := lastLines(now, n)
	if err != nil {
		return errors.Join(err, now.Close())
	}
	if have < n {
		old, err := t.openIf(t.path + before)
		if err != nil {
			return errors.Join(err, now.Close())
		}
		if old != nil && !same(old, now) {
			_ = now.Close() // opened only for reading
			now = old
			if at, _, err = lastLines(now, n-have); err != nil {
				return errors.Join(err, now.Close())
			}
		} else if err := closeAll(old); err != nil {
			return err
		}
	}
	if _, err := now.Seek(at, io.SeekStart); err != nil {
		return errors.Join(fmt.Errorf("read output: %w", err), now.Close())
	}
	t.begun = true
	t.read(now)
	return nil
}

// lastLines returns where the last n lines of a file begin, and how many there
// are.
func lastLines(f *os.File, n int) (at int64, have int, err error) {
	info, err := f.Stat()
	if err != nil {
		return 0, 0, fmt.Errorf("read output: %w", err)
	}
	buf := make([]byte, longest)
	end := info.Size()
	// The end of the last line does not begin another line.
	for at = end; at > 0; {
		size := min(at, int64(len(buf)))
		if _, err := f.ReadAt(buf[:size], at-size); err != nil {
			return 0, 0, fmt.Errorf("read output: %w", err)
		}
		for i := size - 1; i >= 0; i-- {
			if pos := at - size + i + 1; buf[i] == '\n' && pos < end {
				if have++; have >= n {
					return pos, have, nil
				}
			}
		}
		at -= size
	}
	if end > 0 {
		have++
	}
	return 0, have, nil
}
