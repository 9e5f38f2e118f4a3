package filesystem

import (
	"context"
	"errors"
	"time"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/data/segments"
	"github.com/ckptstore/ckptstore/internal/session"
)

// Where the ranks of a launch are on several machines, the process of one of them
// coordinates: it has the pending saves, and commits them. On the other machines, the
// handler *follows* it. Bytes do not travel: a file that is written on a following machine
// lies in the pending save's directory from the beginning, under a name of the
// coordinating process, which gets its size and digests when it is closed. Renames and
// removals are passed on. Files are read on each machine.
//
//	place     reserves the file of a path, for a stream of another machine
//	placed    the stream is closed, and its file durable: its description
//	unplaced  the stream was abandoned

// Upstream makes a request to the coordinating process, of a path as [Prefix] and a name.
type Upstream func(ctx context.Context, path string, in, out any) error

// upstream returns the way to the process that commits what the caller writes; nil: this
// process does.
func (h *Handler) upstream(ctx context.Context) Upstream {
	if c, ok := session.CallerOf(ctx); ok {
		return c.Coordinator()
	}
	return h.up
}

// pass answers a request by that of the coordinating process.
func pass[Out any](ctx context.Context, up Upstream, name string, in any) (out Out, err error) {
	return out, up(ctx, Prefix+name, in, &out)
}

// away is the place of a stream in a pending save of another process.
type away struct {
	up Upstream
	id uint64
}

type placeReply struct {
	Stream uint64 `json:"stream"`
	Dir    string `json:"dir"`  // of the pending save; see [data.Root.JoinPending]
	File   string `json:"file"` // in it
}

type placedRequest struct {
	Stream uint64               `json:"stream"`
	File   segments.Description `json:"file"`
}

// placeAway creates the file of a stream in a pending save of the coordinating process.
func (h *Handler) placeAway(ctx context.Context, up Upstream, s *stream, path string) error {
	got, err := pass[placeReply](ctx, up, "place", createRequest{path})
	if err != nil {
		return err
	}
	s.away = &away{up, got.Stream}
	in, err := h.store.Data.JoinPending(got.Dir)
	if err == nil {
		s.file, err = in.CreateAs(ctx, s.name, got.File)
	}
	if err != nil {
		s.away.drop(h)
		return named(err)
	}
	return nil
}

// dropLimit bounds the notice of an abandoned stream.
const dropLimit = 10 * time.Second

// drop reports that a stream was abandoned. Without the notice, its file stays until its
// save ends.
func (a *away) drop(h *Handler) {
	ctx, cancel := context.WithTimeout(context.Background(), dropLimit)
	defer cancel()
	if _, err := pass[empty](ctx, a.up, "unplaced", discardRequest{a.id}); err != nil {
		h.log.Warn("abandoned file not reported to the coordinating process", "error", err)
	}
}

// hand gives a closed file to the coordinating process.
func (s *stream) hand(ctx context.Context) (closeReply, error) {
	return pass[closeReply](ctx, s.away.up, "placed", placedRequest{s.away.id, s.file.Describe()})
}

// placed is a file that another machine writes.
type placed struct {
	stream
	pending *pending // of a file of DCP
	lies    string   // its name in the directory
}

// onPlace reserves a file.
func (h *Handler) onPlace(ctx context.Context, in createRequest) (placeReply, error) {
	p, err := parse(in.Path)
	if err != nil {
		return placeReply{}, err
	}
	to, name, err := p.written()
	if err != nil {
		return placeReply{}, err
	}
	if err := data.PendingName(name); err != nil {
		return placeReply{}, named(err)
	}
	f := &placed{stream: stream{to: to, name: name}}
	var files *data.Pending
	if isData(name) {
		if f.pending, err = h.begin(ctx, to); err != nil {
			return placeReply{}, err
		}
		defer h.began(f.pending)
		files = f.pending.files
	} else {
		if files, err = h.store.Data.NewPending(ctx); err != nil {
			return placeReply{}, err
		}
		f.own = files
	}
	f.lies = files.Reserve()
	h.mu.Lock()
	id, err := h.number()
	if err == nil {
		h.placed[id] = f
	}
	h.mu.Unlock()
	if err != nil && f.own != nil {
		err = errors.Join(err, f.own.Remove(context.WithoutCancel(ctx)))
	}
	return placeReply{id, files.Dir(), f.lies}, err
}

// takePlaced returns a reserved file, once.
func (h *Handler) takePlaced(id uint64) (*placed, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.placed[id]
	if f == nil {
		return nil, conflict("there is no stream %d: the file was closed, or the trainer or agent that had it has ended; save again", id)
	}
	delete(h.placed, id)
	return f, nil
}

// onPlaced adds a file that another machine has written, as the end of a stream does.
func (h *Handler) onPlaced(ctx context.Context, in placedRequest) (out closeReply, err error) {
	f, err := h.takePlaced(in.Stream)
	if err != nil {
		return out, err
	}
	defer func() { err = f.wrap(err) }()
	if f.pending != nil {
		if h.pendingOf(f.to) != f.pending {
			return out, data.ErrReplaced
		}
		return closeReply{Pending: true}, f.pending.files.Give(ctx, f.name, f.lies, in.File)
	}
	if err = f.own.Give(ctx, f.name, f.lies, in.File); err == nil {
		out, err = h.closedAlone(ctx, &f.stream)
	}
	if gone := f.own.Remove(context.WithoutCancel(ctx)); gone != nil {
		h.log.Warn("copy of a file not removed", "file", f.name, "error", gone)
	}
	return out, err
}

// onUnplaced abandons a reserved file.
func (h *Handler) onUnplaced(ctx context.Context, in discardRequest) (empty, error) {
	f, err := h.takePlaced(in.Stream)
	if err != nil || f.own == nil {
		return empty{}, nil // what is left goes with its save
	}
	return empty{}, f.own.Remove(context.WithoutCancel(ctx))
}
