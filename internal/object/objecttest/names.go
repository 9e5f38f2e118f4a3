package objecttest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/object"
)

func directory(t *testing.T, b object.Backend) {
	for _, name := range []string{"run/main/a", "run/main/b", "run/other/c"} {
		if err := b.MakeDir(t.Context(), name[:strings.LastIndexByte(name, '/')]); err != nil {
			t.Fatal(err)
		}
		if err := put(t, b, name, noise(1), object.Replace); err != nil {
			t.Fatal(err)
		}
	}
	for dir, want := range map[string][]string{"": {"run"}, "run": {"main", "other"}, "run/main": {"a", "b"}} {
		in, err := b.List(t.Context(), dir)
		names := object.Names(in)
		slices.Sort(names)
		for _, e := range in {
			if e.Info == nil {
				continue
			}
			if is, err := b.Stat(t.Context(), path.Join(dir, e.Name)); err != nil || is.Dir != e.Info.Dir || !is.Dir && is.Size != e.Info.Size {
				t.Errorf("%s in %q is listed as %+v, and is %+v, %v", e.Name, dir, *e.Info, is, err)
			}
		}
		if err != nil || !slices.Equal(names, want) {
			t.Errorf("list of %q: %v, %v; want %v", dir, names, err, want)
		}
	}
	for name, dir := range map[string]bool{"run": true, "run/main": true, "run/main/a": false} {
		if info, err := b.Stat(t.Context(), name); err != nil || info.Dir != dir {
			t.Errorf("stat of %s: %+v, %v", name, info, err)
		}
	}
	if err := b.Sync(t.Context(), "run/main"); err != nil {
		t.Error(err)
	}
	if names, err := b.List(t.Context(), "nowhere"); len(names) > 0 || err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("list of a directory that is not there: %v, %v", names, err)
	}
}

func removed(t *testing.T, b object.Backend) {
	if err := put(t, b, "run/main/a", noise(1), object.Replace); err != nil {
		t.Fatal(err)
	}
	f, err := b.Open(t.Context(), "run/main/a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(make([]byte, 1), 0); err != nil {
		t.Fatal(err)
	}
	_ = b.Remove(t.Context(), "run/main") // refused, or nothing: the file must stay
	want(t, b, "run/main/a", noise(1))
	for range 2 {
		if err := b.Remove(t.Context(), "run/main/a"); err != nil {
			t.Error(err)
		}
	}
	if _, err := b.Stat(t.Context(), "run/main/a"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat of what was removed: %v", err)
	}
	got := []byte{^noise(1)[0]}
	if _, err := f.ReadAt(got, 0); err == nil && got[0] != noise(1)[0] {
		t.Error("a reader that has it open reads something else")
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if err := b.Remove(t.Context(), "run/main"); err != nil {
		t.Error(err)
	}
}

// link removes the first name of a file that has two.
func link(t *testing.T, b object.Backend) {
	for _, name := range []string{"run/main/a", "run/main/b"} {
		if err := put(t, b, name, noise(len(name)+int(name[len(name)-1])), object.Replace); err != nil {
			t.Fatal(err)
		}
	}
	err := b.Link(t.Context(), "run/main/a", "run/main/c", object.Exclusive)
	if errors.Is(err, errors.ErrUnsupported) {
		if _, err := b.Stat(t.Context(), "run/main/c"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("links are not supported, and it is there: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Link(t.Context(), "run/main/a", "run/main/b", object.Exclusive); !errors.Is(err, fs.ErrExist) {
		t.Errorf("link to a name that is taken: %v", err)
	}
	if err := b.Link(t.Context(), "run/main/none", "run/main/d", object.Exclusive); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("link of what is not there: %v", err)
	}
	a, _ := b.Stat(t.Context(), "run/main/a")
	c, _ := b.Stat(t.Context(), "run/main/c")
	if a.ID != c.ID || a.Links != c.Links || a.Links == 1 {
		t.Errorf("of two names of one file: %+v and %+v", a, c)
	}
	if err := b.Remove(t.Context(), "run/main/a"); err != nil {
		t.Fatal(err)
	}
	want(t, b, "run/main/c", noise(len("run/main/a")+int('a')))
	if err := b.Link(t.Context(), "run/main/c", "run/main/b", object.Replace); err != nil {
		t.Fatal(err)
	}
	want(t, b, "run/main/b", noise(len("run/main/a")+int('a')))
	if names, err := b.List(t.Context(), "run/main"); err != nil || len(names) != 2 {
		t.Errorf("left %v, %v", names, err)
	}
}

func badNames(t *testing.T, b object.Backend) {
	for _, name := range []string{"..", "../x", "/x", "run//x", "run/./x", "run/../../x", "run/x\x00", "."} {
		if _, err := b.Create(t.Context(), name, 1, object.Replace); err == nil {
			t.Errorf("created %q", name)
		}
		if _, err := b.Open(t.Context(), name); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("open of %q: %v", name, err)
		}
		if _, err := b.Get(t.Context(), name, 1); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("get of %q: %v", name, err)
		}
		if err := b.Remove(t.Context(), name); err == nil {
			t.Errorf("removed %q", name)
		}
	}
}

// ended calls every method with a context that has ended.
func ended(t *testing.T, b object.Backend) {
	if err := put(t, b, "run/main/a", noise(1), object.Replace); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, create := b.Create(ctx, "run/main/b", 1, object.Replace)
	_, open := b.Open(ctx, "run/main/a")
	_, stat := b.Stat(ctx, "run/main/a")
	_, get := b.Get(ctx, "run/main/a", 1)
	_, list := b.List(ctx, "run/main")
	for what, err := range map[string]error{
		"create": create, "open": open, "stat": stat, "get": get, "list": list,
		"make a directory": b.MakeDir(ctx, "run/more"), "remove": b.Remove(ctx, "run/main/a"), "sync": b.Sync(ctx, "run/main"),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", what, err)
		}
	}
	want(t, b, "run/main/a", noise(1))
}

func notThere(t *testing.T, b object.Backend) {
	if err := read(t, b, "run/main/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read: %v", err)
	}
	if _, err := b.Get(t.Context(), "run/main/none", 1<<20); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("get: %v", err)
	}
	if _, err := b.Stat(t.Context(), "nowhere/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat: %v", err)
	}
	if err := b.Remove(t.Context(), "nowhere/none", "run/main/none"); err != nil {
		t.Errorf("remove: %v", err)
	}
	if err := b.Remove(t.Context()); err != nil {
		t.Errorf("remove of nothing: %v", err)
	}
}

func usage(t *testing.T, b object.Backend) {
	u, err := b.Usage(t.Context())
	if err != nil && !errors.Is(err, errors.ErrUnsupported) || err == nil && (u.Free == 0 || u.Size < u.Free) {
		t.Errorf("usage %+v, %v", u, err)
	}
}

// shortRead reads beyond the end of a file.
func shortRead(t *testing.T, b object.Backend) {
	if err := put(t, b, "run/main/a", noise(1000), object.Replace); err != nil {
		t.Fatal(err)
	}
	f, err := b.Open(t.Context(), "run/main/a")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ off, size, want int }{{900, 100, 100}, {900, 200, 100}, {1000, 1, 0}, {5000, 1, 0}} {
		n, err := f.ReadAt(make([]byte, c.size), int64(c.off))
		if n != c.want || n < c.size && !errors.Is(err, io.EOF) {
			t.Errorf("%d bytes at %d: %d, %v", c.size, c.off, n, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
