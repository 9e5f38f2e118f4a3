package s3

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

// gather is the body of a request that lies in several runs of memory. The connection may read
// it after the request has failed, so it is detached from the memory before the memory is
// returned to its owner.
type gather struct {
	mu   sync.Mutex
	runs [][]byte // nil once detached
	gone bool
	run  int // the position: a run
	at   int // and a byte in it
}

var errDetached = errors.New("the request has ended")

func newGather(runs [][]byte) *gather { return &gather{runs: runs} }

// Read implements [io.Reader].
func (g *gather) Read(p []byte) (n int, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gone {
		return 0, errDetached
	}
	ok := object.Readable(func() {
		for n < len(p) && g.run < len(g.runs) {
			more := copy(p[n:], g.runs[g.run][g.at:])
			n, g.at = n+more, g.at+more
			if g.at == len(g.runs[g.run]) {
				g.run, g.at = g.run+1, 0
			}
		}
	})
	switch {
	case !ok:
		return 0, object.ErrUnreadable
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// Seek implements [io.Seeker], to the beginning: requests are sent again from there.
func (g *gather) Seek(offset int64, whence int) (int64, error) {
	if offset != 0 || whence != io.SeekStart {
		return 0, fmt.Errorf("seek to %d of a request's body: %w", offset, errors.ErrUnsupported)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.run, g.at = 0, 0
	return 0, nil
}

// detach ends all reads.
func (g *gather) detach() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.runs, g.gone = nil, true
}

// sum returns the CRC-32C of runs.
func sum(runs [][]byte) (crc uint32, err error) {
	ok := object.Readable(func() {
		for _, run := range runs {
			crc = crc32c.Update(crc, run)
		}
	})
	if !ok {
		return 0, object.ErrUnreadable
	}
	return crc, nil
}

func length(runs [][]byte) (n int64) {
	for _, run := range runs {
		n += int64(len(run))
	}
	return n
}
