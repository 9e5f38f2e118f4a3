package objecttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/internal/object"
)

// Test checks a backend against the documentation of package object. open returns an empty
// backend.
func Test(t *testing.T, open func(t testing.TB) object.Backend) {
	for name, test := range map[string]func(*testing.T, object.Backend){
		"sizes":      sizes,
		"unseen":     unseen,
		"replaced":   replaced,
		"exclusive":  exclusive,
		"one wins":   oneWins,
		"parallel":   parallel,
		"directory":  directory,
		"removed":    removed,
		"link":       link,
		"bad names":  badNames,
		"ended":      ended,
		"not there":  notThere,
		"usage":      usage,
		"short read": shortRead,
		"ranges":     ranges,
		"get":        small,
		"gathered":   gathered,
		"many":       many,
	} {
		t.Run(name, func(t *testing.T) {
			b := open(t)
			if err := b.MakeDir(t.Context(), "run/main"); err != nil {
				t.Fatal(err)
			}
			test(t, b)
		})
	}
}

// noise returns unique bytes.
func noise(size int) []byte {
	p := object.Buffer(size)
	_, _ = rand.NewChaCha8([32]byte{byte(size)}).Read(p) // never fails
	return p
}

// put makes a file.
func put(t *testing.T, b object.Backend, name string, data []byte, mode object.Mode) error {
	t.Helper()
	u, err := b.Create(t.Context(), name, int64(len(data)), mode)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := u.WriteAt(data, 0); n != len(data) || err != nil {
		t.Fatalf("wrote %d bytes of %d: %v", n, len(data), err)
	}
	return u.Commit(t.Context())
}

// get returns the contents of a file.
func get(t *testing.T, b object.Backend, name string) []byte {
	t.Helper()
	f, err := b.Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, info.Size)
	if n, err := f.ReadAt(data, 0); n != len(data) || err != nil && !errors.Is(err, io.EOF) {
		t.Fatalf("read %d bytes of %d: %v", n, len(data), err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return data
}

// read opens a file and reads a byte of it.
func read(t *testing.T, b object.Backend, name string) error {
	t.Helper()
	f, err := b.Open(t.Context(), name)
	if err != nil {
		return err
	}
	_, err = f.ReadAt(make([]byte, 1), 0)
	return errors.Join(err, f.Close())
}

func want(t *testing.T, b object.Backend, name string, data []byte) {
	t.Helper()
	if got := get(t, b, name); !bytes.Equal(got, data) {
		t.Errorf("%s holds %d bytes, which are not the %d that were written", name, len(got), len(data))
	}
	if info, err := b.Stat(t.Context(), name); err != nil || info.Size != int64(len(data)) || info.Dir {
		t.Errorf("stat of %s: %+v, %v", name, info, err)
	}
}

// sizes writes files in pieces, several at a time and in any order, and in one call.
func sizes(t *testing.T, b object.Backend) {
	for _, size := range []int{0, 1, object.Align - 1, object.Align, 70_000, 1 << 20, 1<<20 + 3, 9<<20 + 4097} {
		for _, whole := range []bool{false, true} {
			name := fmt.Sprintf("run/main/%d-%v", size, whole)
			data := noise(size)
			u, err := b.Create(t.Context(), name, int64(size), object.Replace)
			if err != nil {
				t.Fatal(err)
			}
			piece := u.Piece()
			if whole {
				piece = max(size, 1)
			}
			var starts []int
			for at := 0; at < size; at += piece {
				starts = append(starts, at)
			}
			rand.Shuffle(len(starts), func(i, j int) { starts[i], starts[j] = starts[j], starts[i] })
			next := make(chan int, len(starts))
			for _, at := range starts {
				next <- at
			}
			close(next)
			var g sync.WaitGroup
			for range max(u.Depth(), 1) {
				g.Go(func() {
					for at := range next {
						p := data[at:min(at+piece, size)]
						before := bytes.Clone(p)
						if n, err := u.WriteAt(p, int64(at)); n != len(p) || err != nil {
							t.Errorf("write of %d bytes at %d: %d, %v", len(p), at, n, err)
						}
						if !bytes.Equal(p, before) {
							t.Error("a write has changed what it was given")
						}
					}
				})
			}
			g.Wait()
			if err := u.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			want(t, b, name, data)
		}
	}
}

// unseen looks for a file before it is committed, and after it was aborted.
func unseen(t *testing.T, b object.Backend) {
	const name = "run/main/f"
	look := func(when string) {
		t.Helper()
		if err := read(t, b, name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: a read gives %v", when, err)
		}
		if _, err := b.Stat(t.Context(), name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: stat gives %v", when, err)
		}
		in, err := b.List(t.Context(), "run/main")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Error(err)
		}
		for _, n := range object.Names(in) {
			if !strings.HasSuffix(n, object.Partial) {
				t.Errorf("%s: listed as %s", when, n)
			}
		}
	}
	for _, mode := range []object.Mode{object.Replace, object.Exclusive} {
		u, err := b.Create(t.Context(), name, 2<<20, mode)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := u.WriteAt(noise(2<<20), 0); err != nil {
			t.Fatal(err)
		}
		look("before the commit")
		u.Abort()
		u.Abort()
		look("after the abort")
		if err := u.Commit(t.Context()); err == nil {
			t.Error("committed after the abort")
		}
		look("after that")
		ctx, cancel := context.WithCancel(t.Context())
		u, err = b.Create(ctx, name, 1, mode)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		if err := u.Commit(ctx); err == nil {
			t.Error("committed though the context has ended")
		}
		look("after the context ended")
	}
	if err := put(t, b, name, noise(100), object.Replace); err != nil {
		t.Fatal(err)
	}
	want(t, b, name, noise(100))
}

// replaced reads a file through a replacement.
func replaced(t *testing.T, b object.Backend) {
	const name = "run/main/f"
	if err := put(t, b, name, noise(3000), object.Replace); err != nil {
		t.Fatal(err)
	}
	f, err := b.Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 3000)
	if n, err := f.ReadAt(got[:1000], 0); n < 1000 || !bytes.Equal(got[:1000], noise(3000)[:1000]) {
		t.Fatalf("before the replacement: %d, %v", n, err)
	}
	if err := put(t, b, name, noise(2000), object.Replace); err != nil {
		t.Fatal(err)
	}
	for at := 1000; at < 3000; at += 500 {
		n, err := f.ReadAt(got[at:at+500], int64(at))
		if !bytes.Equal(got[at:at+n], noise(3000)[at:at+n]) || n < 500 && err == nil {
			t.Errorf("after it, %d bytes at %d are not those that were opened: %v", n, at, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	want(t, b, name, noise(2000))
}

func exclusive(t *testing.T, b object.Backend) {
	const name = "run/main/f"
	if err := put(t, b, name, noise(10), object.Exclusive); err != nil {
		t.Fatal(err)
	}
	if err := put(t, b, name, noise(20), object.Exclusive); !errors.Is(err, fs.ErrExist) {
		t.Errorf("the second one: %v", err)
	}
	want(t, b, name, noise(10))
	names, err := b.List(t.Context(), "run/main")
	if err != nil || len(names) != 1 {
		t.Errorf("listed %v, %v: the losing upload is still there", names, err)
	}
}

// oneWins writes a file from many goroutines in parallel: one of them gets the name.
func oneWins(t *testing.T, b object.Backend) {
	data := noise(3 << 20)
	var uploads []object.Upload
	for range 8 {
		u, err := b.Create(t.Context(), "run/main/f", int64(len(data)), object.Exclusive)
		if err != nil {
			t.Fatal(err)
		}
		uploads = append(uploads, u)
	}
	for _, at := range pieces(uploads[0], len(data)) {
		for _, u := range uploads {
			if _, err := u.WriteAt(data[at:min(at+u.Piece(), len(data))], int64(at)); err != nil {
				t.Fatal(err)
			}
		}
	}
	var won atomic.Int32
	var g sync.WaitGroup
	for _, u := range uploads {
		g.Go(func() {
			if u.Commit(t.Context()) == nil {
				won.Add(1)
			}
		})
	}
	g.Wait()
	if won.Load() != 1 {
		t.Errorf("%d of %d have made it", won.Load(), len(uploads))
	}
	want(t, b, "run/main/f", data)
}

// parallel writes a file twice at the same time: the name has all bytes of one upload, in
// whatever order they begin, write, commit or abort.
func parallel(t *testing.T, b object.Backend) {
	const name, size = "run/main/f", 9 << 20
	first, second := noise(size), noise(size + 1)[:size]
	write := func(u object.Upload, data []byte, part func(i int) bool) {
		t.Helper()
		for i, at := range pieces(u, size) {
			if part(i) {
				if _, err := u.WriteAt(data[at:min(at+u.Piece(), size)], int64(at)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for _, mode := range []object.Mode{object.Replace, object.Exclusive} {
		if err := b.Remove(t.Context(), name); err != nil {
			t.Fatal(err)
		}
		a, err := b.Create(t.Context(), name, size, mode)
		if err != nil {
			t.Fatal(err)
		}
		write(a, first, func(i int) bool { return i == 0 })
		c, err := b.Create(t.Context(), name, size, mode)
		if err != nil {
			t.Fatal(err)
		}
		write(c, second, func(i int) bool { return i == 0 })
		write(a, first, func(i int) bool { return i > 0 })
		if err := a.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		want(t, b, name, first)
		write(c, second, func(i int) bool { return i > 0 })
		want(t, b, name, first)
		err = c.Commit(t.Context())
		if mode == object.Exclusive {
			if !errors.Is(err, fs.ErrExist) {
				t.Errorf("the second one: %v", err)
			}
			want(t, b, name, first)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		want(t, b, name, second)
		d, err := b.Create(t.Context(), name, size, mode)
		if err != nil {
			t.Fatal(err)
		}
		write(d, first, func(i int) bool { return i == 0 })
		d.Abort()
		want(t, b, name, second)
	}
}

// pieces returns the offsets of the pieces of an upload.
func pieces(u object.Upload, size int) (at []int) {
	for off := 0; off < size; off += u.Piece() {
		at = append(at, off)
	}
	return at
}
