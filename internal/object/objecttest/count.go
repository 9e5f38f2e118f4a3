package objecttest

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/ckptstore/ckptstore/internal/object"
)

// Requests counts what a bucket would be asked.
type Requests struct {
	Get, Head, List        int
	Put                    int // files in one piece
	Create, Part, Complete int // files in several
	Delete                 int
	Read                   int64 // bytes
}

// Total returns the number of requests.
func (r Requests) Total() int {
	return r.Get + r.Head + r.List + r.Put + r.Create + r.Part + r.Complete + r.Delete
}

// Counting is a backend that counts the requests to another.
type Counting struct {
	object.Backend
	mu sync.Mutex
	n  Requests
}

// Count returns a backend that counts the requests to b.
func Count(b object.Backend) *Counting { return &Counting{Backend: b} }

// Since returns the requests since the last call.
func (c *Counting) Since() Requests {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.n
	c.n = Requests{}
	return n
}

func (c *Counting) add(count func(n *Requests)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	count(&c.n)
}

// Get implements [object.Backend].
func (c *Counting) Get(ctx context.Context, name string, most int64) ([]byte, error) {
	data, err := c.Backend.Get(ctx, name, most)
	c.add(func(n *Requests) { n.Get++; n.Read += int64(len(data)) })
	return data, err
}

// Stat implements [object.Backend].
func (c *Counting) Stat(ctx context.Context, name string) (object.Info, error) {
	c.add(func(n *Requests) { n.Head++ })
	return c.Backend.Stat(ctx, name)
}

// List implements [object.Backend]. A listing has pages of a thousand names.
func (c *Counting) List(ctx context.Context, dir string) ([]object.Entry, error) {
	in, err := c.Backend.List(ctx, dir)
	c.add(func(n *Requests) { n.List += max((len(in)+999)/1000, 1) })
	return in, err
}

// Remove implements [object.Backend].
func (c *Counting) Remove(ctx context.Context, names ...string) error {
	c.add(func(n *Requests) { n.Delete += (len(names) + 999) / 1000 })
	return c.Backend.Remove(ctx, names...)
}

// Create implements [object.Backend].
func (c *Counting) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	u, err := c.Backend.Create(ctx, name, size, mode)
	if err != nil {
		return nil, err
	}
	counted := countedUpload{u, c, size > int64(u.Piece())}
	if g, ok := u.(object.Gatherer); ok {
		return countedGatherer{counted, g}, nil
	}
	return counted, nil
}

type countedUpload struct {
	object.Upload
	c       *Counting
	inParts bool
}

func (u countedUpload) WriteAt(p []byte, off int64) (int, error) {
	u.part(off)
	return u.Upload.WriteAt(p, off)
}

func (u countedUpload) part(off int64) {
	u.c.add(func(n *Requests) {
		switch {
		case !u.inParts:
		case off == 0:
			n.Create++
			n.Part++
		default:
			n.Part++
		}
	})
}

func (u countedUpload) Commit(ctx context.Context) error {
	u.c.add(func(n *Requests) {
		if u.inParts {
			n.Complete++
		} else {
			n.Put++
		}
	})
	return u.Upload.Commit(ctx)
}

type countedGatherer struct {
	countedUpload
	to object.Gatherer
}

// GatherDepth implements [object.Gatherer].
func (u countedGatherer) GatherDepth() int { return u.to.GatherDepth() }

// WriteFrom implements [object.Gatherer].
func (u countedGatherer) WriteFrom(p [][]byte, off int64, sum uint32) error {
	u.part(off)
	return u.to.WriteFrom(p, off, sum)
}

// Open implements [object.Backend]. A bucket is asked by the first read.
func (c *Counting) Open(ctx context.Context, name string) (object.Object, error) {
	f, err := c.Backend.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	counted := &countedObject{Object: f, c: c}
	if r, ok := f.(object.Ranger); ok {
		return &countedRanger{counted, r}, nil
	}
	return counted, nil
}

type countedObject struct {
	object.Object
	c    *Counting
	mu   sync.Mutex
	seen bool // a read has told the size
}

func (o *countedObject) got(bytes int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.seen = true
	o.c.add(func(n *Requests) { n.Get++; n.Read += bytes })
}

// ReadAt implements [io.ReaderAt].
func (o *countedObject) ReadAt(p []byte, off int64) (int, error) {
	n, err := o.Object.ReadAt(p, off)
	o.got(int64(n))
	return n, err
}

// Stat implements [object.Object].
func (o *countedObject) Stat() (object.Info, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.seen {
		o.seen = true
		o.c.add(func(n *Requests) { n.Head++ })
	}
	return o.Object.Stat()
}

type countedRanger struct {
	*countedObject
	from object.Ranger
}

// ReadRange implements [object.Ranger].
func (o *countedRanger) ReadRange(off, n int64) (io.ReadCloser, error) {
	body, err := o.from.ReadRange(off, n)
	o.got(n)
	if err != nil {
		return nil, errors.Join(err)
	}
	return body, nil
}
