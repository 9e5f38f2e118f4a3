package restore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// reader reads the checkpoint that a reference names. One that lies at a path
// has that path for its ID.
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

// from names the trial that a load reads from, if that is another than the group's
// own: the IDs of two trials may be the same.
func (r *restore) from() string {
	if cfg := r.l.cfg; r.ckpt.Run == "" || r.ckpt.Run == cfg.Run && r.ckpt.Trial == cfg.Trial {
		return ""
	}
	return r.ckpt.Run + "/" + r.ckpt.Trial
}

// unreadable says what to do about a checkpoint that is damaged or gone: the
// next attempt would resume from it too.
func unreadable(c projections.Checkpoint, err error) error {
	if c.Run == "" || !errors.As(err, new(*data.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%w; `ckptstore ls %s` lists the others: end the job and start it with --resume %s@ID of an intact one", err, c.Run, c.Run)
}
