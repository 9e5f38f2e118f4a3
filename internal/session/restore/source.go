package restore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
)

// reader opens the checkpoint that a reference names. A checkpoint at a path has
// the path as its ID.
func (c *Config) reader(ctx context.Context, ref string) (data.Reader, projections.Checkpoint, error) {
	if IsPath(ref) {
		f, err := c.Store.Foreign(ctx, ref)
		if err != nil {
			return nil, projections.Checkpoint{}, err
		}
		return f, projections.Checkpoint{ID: f.Path(), Step: -1}, nil
	}
	row, err := c.Store.Resolve(ctx, Qualify(c.Run, c.Trial, ref))
	if err != nil {
		return nil, row, err
	}
	r, err := c.open(ctx, row)
	return r, row, err
}

// open opens a checkpoint that was resolved, here or by another node.
func (c *Config) open(ctx context.Context, row projections.Checkpoint) (data.Reader, error) {
	if row.Run == "" {
		return c.Store.Foreign(ctx, row.ID)
	}
	digest, err := checkpoint.ParseDigest(row.Manifest)
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s: %w", row.ID, err)
	}
	return c.Store.Reader(c.Store.Data.Reader(checkpoint.RefOf(row.Run, row.Trial, row.ID)).WithManifest(digest)), nil
}

// from returns the trial that a load reads from if it is not the group's own: two
// trials may have the same checkpoint IDs.
func (c *Config) from(row projections.Checkpoint) string {
	if row.Run == "" || row.Run == c.Run && row.Trial == c.Trial {
		return ""
	}
	return row.Run + "/" + row.Trial
}

// unreadable adds the next step to the error of a damaged or missing checkpoint:
// the next attempt would resume from it too.
func unreadable(c projections.Checkpoint, err error) error {
	if c.Run == "" || !errors.As(err, new(*data.CorruptError)) && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return fmt.Errorf("%w; `ckptstore ls %s` lists the others: end the job and start it with --resume %s@ID of an intact one", err, c.Run, c.Run)
}

// hold holds the slots and replicas of this node that have data of a checkpoint of this trial.
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
	tierPeers = "peers"
	tierFiles = "files"
)

// tierOf returns the tiers that a restore's bytes came from.
func tierOf(of Report) string {
	var tiers []string
	if of.Slots > 0 {
		tiers = append(tiers, tierSlots)
	}
	if of.Peers > 0 {
		tiers = append(tiers, tierPeers)
	}
	if of.Files > 0 || of.Passed > 0 || len(tiers) == 0 {
		tiers = append(tiers, tierFiles)
	}
	return strings.Join(tiers, "+")
}

// fetch copies slots of this node's ranks from another node if the load reads their chunks and
// this node does not have them: it replaces the node that had. It reports whether there may be more slots
// than held. Without an answer, files are read.
func (r *restore) fetch(ctx context.Context, held staging.Copies) bool {
	if _, own := r.reader.(*data.FileReader); !own || r.l.cfg.Fetch == nil || r.ckpt.Run != r.l.cfg.Run || r.ckpt.Trial != r.l.cfg.Trial {
		r.l.fetched(ctx, "", nil)
		return false
	}
	lacks := map[int]bool{}
	for _, of := range r.ranks {
		for _, read := range of.reads {
			if held[read.Rank] == nil && slices.Contains(r.l.cfg.Local, read.Rank) {
				lacks[read.Rank] = true
			}
		}
	}
	if rest := r.l.fetched(ctx, r.ckpt.ID, slices.Sorted(maps.Keys(lacks))); len(rest) > 0 {
		r.l.cfg.Fetch(ctx, r.ckpt.ID, rest, nil)
	}
	return len(lacks) > 0
}
