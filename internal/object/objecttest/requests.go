package objecttest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/object"
)

// ranges reads parts of a file as streams, also several at a time, and beyond its end.
func ranges(t *testing.T, b object.Backend) {
	data := noise(3<<20 + 17)
	if err := put(t, b, "run/main/a", data, object.Replace); err != nil {
		t.Fatal(err)
	}
	f, err := b.Open(t.Context(), "run/main/a")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	r, ok := f.(object.Ranger)
	if !ok {
		if b.Reading() != (object.Reading{}) {
			t.Error("reads have a best size, and there are no ranges")
		}
		return
	}
	var g sync.WaitGroup
	for _, at := range [][2]int{{0, 1}, {0, len(data)}, {17, 1 << 20}, {len(data) - 1, 1}, {1 << 20, 1<<20 + 1}} {
		g.Go(func() {
			body, err := r.ReadRange(int64(at[0]), int64(at[1]))
			if err != nil {
				t.Errorf("range %v: %v", at, err)
				return
			}
			got, err := io.ReadAll(body)
			if err = errors.Join(err, body.Close()); err != nil || !bytes.Equal(got, data[at[0]:at[0]+at[1]]) {
				t.Errorf("range %v has %d bytes: %v", at, len(got), err)
			}
		})
	}
	g.Wait()
	for _, at := range []int{len(data) - 5, len(data), len(data) + 1000} {
		body, err := r.ReadRange(int64(at), 10)
		if err == nil {
			_, err = io.ReadAll(body)
			err = errors.Join(err, body.Close())
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a range from %d beyond the end at %d: %v", at, len(data), err)
		}
	}
	// A stream that is not read to its end.
	if body, err := r.ReadRange(0, int64(len(data))); err != nil || body.Close() != nil {
		t.Errorf("a range that is closed at once: %v", err)
	}
}

// small gets small files whole.
func small(t *testing.T, b object.Backend) {
	for _, size := range []int{0, 1, 513, 70_000} {
		name := fmt.Sprintf("run/main/%d", size)
		if err := put(t, b, name, noise(size), object.Exclusive); err != nil {
			t.Fatal(err)
		}
		if got, err := b.Get(t.Context(), name, int64(size)); err != nil || !bytes.Equal(got, noise(size)) {
			t.Errorf("%d bytes: got %d, %v", size, len(got), err)
		}
		if _, err := b.Get(t.Context(), name, int64(size)-1); !errors.Is(err, object.ErrTooLarge) {
			t.Errorf("%d bytes of at most %d: %v", size, size-1, err)
		}
	}
}

// gathered writes pieces from several runs of memory, where the backend can, and refuses
// bytes that differ from their sum.
func gathered(t *testing.T, b object.Backend) {
	for _, damaged := range []bool{false, true} {
		data := noise(9<<20 + 4097)
		u, err := b.Create(t.Context(), "run/main/a", int64(len(data)), object.Exclusive)
		if err != nil {
			t.Fatal(err)
		}
		g, ok := u.(object.Gatherer)
		if !ok {
			u.Abort()
			return
		}
		for _, at := range pieces(u, len(data)) {
			piece := data[at:min(at+u.Piece(), len(data))]
			sum := crc32c.Checksum(piece)
			var runs [][]byte
			for rest := piece; len(rest) > 0; {
				n := min(1+rand.IntN(1<<20), len(rest))
				runs, rest = append(runs, rest[:n]), rest[n:]
			}
			if damaged && at == 0 {
				piece[100] ^= 1
			}
			if err = g.WriteFrom(runs, int64(at), sum); err != nil {
				break
			}
		}
		if err == nil {
			err = u.Commit(t.Context())
		}
		u.Abort()
		if damaged && !errors.Is(err, object.ErrChanged) {
			t.Errorf("a piece that differs from its sum: %v", err)
		}
		if damaged {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		want(t, b, "run/main/a", data)
		if err := b.Remove(t.Context(), "run/main/a"); err != nil {
			t.Fatal(err)
		}
	}
	if err := read(t, b, "run/main/a"); err == nil {
		t.Error("the file with the damaged piece is there")
	}
}

// many lists and removes more files than one answer of a bucket has.
func many(t *testing.T, b object.Backend) {
	const count = 1001
	var names []string
	var g sync.WaitGroup
	limit := make(chan struct{}, 32)
	for i := range count {
		name := fmt.Sprintf("run/main/%04d", i)
		names = append(names, name)
		limit <- struct{}{}
		g.Go(func() {
			defer func() { <-limit }()
			u, err := b.Create(t.Context(), name, 1, object.Exclusive)
			if err == nil {
				_, err = u.WriteAt([]byte{1}, 0)
			}
			if err == nil {
				err = u.Commit(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	g.Wait()
	if in, err := b.List(t.Context(), "run/main"); err != nil || len(in) != count {
		t.Errorf("listed %d of %d: %v", len(in), count, err)
	}
	if err := b.Remove(t.Context(), append(names, "run/main/none")...); err != nil {
		t.Error(err)
	}
	if in, err := b.List(t.Context(), "run/main"); err != nil || len(in) != 0 {
		t.Errorf("%d are left: %v", len(in), err)
	}
}
