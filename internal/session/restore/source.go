package restore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
)

// reader opens the checkpoint that a reference names. A checkpoint at a path has
// the path as its ID.
func (l *Loader) reader(ctx context.Context, ref string) (data.Reader, projections.Checkpoint, error) {
	if IsPath(ref) {
		f, err := l.cfg.Store.Foreign(ctx, ref)
		if err != nil {
			return nil, projections.Checkpoint{}, err
		}
		return f, projections.Checkpoint{ID: f.Path(), Step: -1}, nil
	}
	c, err := l.cfg.Store.Resolve(ctx, Qualify(l.cfg.Run, ref))
	if err != nil {
		return nil, c, err
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return nil, c, fmt.Errorf("checkpoint %s: %w", c.ID, err)
	}
	return l.cfg.Store.Reader(l.cfg.Store.Data.Reader(checkpoint.RefOf(c.Run, c.Trial, c.ID)).WithManifest(digest)), c, nil
}

// from returns the trial that a load reads from if it is not the group's own: two
// trials may have the same checkpoint IDs.
func (r *restore) from() string {
	if cfg := r.l.cfg; r.ckpt.Run == "" || r.ckpt.Run == cfg.Run && r.ckpt.Trial == cfg.Trial {
		return ""
	}
	return r.ckpt.Run + "/" + r.ckpt.Trial
}

// unreadable adds the next step to the error of a damaged or missing checkpoint:
// the next attempt would resume from it too.
func unreadable(c projections.Checkpoint, err error) error {
	if c.Run == "" || !errors.As(err, new(*data.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%w; `ckptstore ls %s` lists the others: end the job and start it with --resume %s@ID of an intact one", err, c.Run, c.Run)
}

// hold holds the slots of this node that have data of a checkpoint of this trial.
func (r *restore) hold() (held staging.Copies, release func()) {
	if r.ckpt.Run != r.l.cfg.Run || r.ckpt.Trial != r.l.cfg.Trial {
		return nil, func() {}
	}
	return r.l.cfg.Arenas.Hold(r.ckpt.ID)
}

// fromSlots reads from slots. Only data with the checkpoint's digests is used;
// the rest is read from the files.
func (r *restore) fromSlots(ctx context.Context, held staging.Copies, wants []checkpoint.Want, reads []checkpoint.Read, dst loadTarget) (n int64, rest []checkpoint.Read, err error) {
	files, ok := r.reader.(*data.FileReader)
	if !ok || len(held) == 0 {
		return 0, reads, nil
	}
	got, err := files.ReadMemory(ctx, wants, reads, dst, held)
	if len(got.Unfit) > 0 {
		r.l.cfg.Logger.Warn("shared memory differs from the committed checkpoint; reading files instead",
			"checkpoint", r.ckpt.ID, "chunks", len(got.Unfit), "first", got.Unfit[0])
	}
	return got.Bytes, got.Rest, err
}

// The tiers of a restore.
const (
	tierSlots = "slots"
	tierFiles = "files"
)

// tierOf returns the tier that a restore's bytes came from.
func tierOf(slots, files int64) string {
	switch {
	case slots == 0:
		return tierFiles
	case files == 0:
		return tierSlots
	}
	return tierSlots + "+" + tierFiles
}

// Load joins the rank's next load with ranks, which are distinct and ascending,
// and returns the reply. It waits up to limit for the other ranks.
func (l *Loader) Load(ctx context.Context, rank int, ranks []int, req client.LoadRequest, limit time.Duration) (client.LoadReply, error) {
	for _, it := range req.Items {
		if it.FQN == "" {
			return client.LoadReply{}, &MisuseError{errors.New("an item has no name")}
		}
	}
	ld, err := l.join(rank, ranks, req)
	if err != nil {
		return client.LoadReply{}, err
	}
	wait, cancel := l.bounded(ctx, limit)
	defer cancel()
	select {
	case <-ld.complete:
	case <-wait.Done():
		absent := l.absent(ld)
		l.leave(ld, rank)
		return client.LoadReply{}, fmt.Errorf("load %d is a collective, and ranks %v have not called it: %w", ld.n, absent, wait.Err())
	}
	if ld.over != nil {
		return client.LoadReply{}, &ConflictError{ld.over}
	}
	select {
	case <-ld.done:
		return l.take(ld, rank)
	case <-ctx.Done():
		l.leave(ld, rank)
		return client.LoadReply{}, ctx.Err()
	}
}
