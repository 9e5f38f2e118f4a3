package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/projections"
)

// ErrNotWhole is returned if files of a checkpoint to resume from are missing or
// damaged.
var ErrNotWhole = problem.New(problem.Damage, "the checkpoint is not whole")

// maxPassedOver bounds how many passed-over checkpoints one event lists.
const maxPassedOver = 100

// candidate is a checkpoint that an attempt may resume from.
type candidate struct {
	id     string                 // as in [Config].Resume and the events
	row    projections.Checkpoint // zero for a path
	defect string                 // what is wrong with its files; "": no defect was found
}

// own reports whether the candidate is of the trial's own line, not the checkpoint
// that the line started from.
func (c candidate) own(run, trial string) bool { return c.row.Run == run && c.row.Trial == trial }

// candidate checks a checkpoint: that its manifest, indexes and data files exist,
// fit each other and have the right sizes. It reads no data file.
func (j *job) candidate(ctx context.Context, id string) (c candidate, err error) {
	c.id = id
	if restore.IsPath(id) {
		if _, err := j.store.Foreign(ctx, id); err != nil {
			c.defect = err.Error()
		}
		return c, ctx.Err()
	}
	if c.row, err = j.store.Views.Resolve(ctx, restore.Qualify(j.cfg.Run, j.cfg.Trial, id)); err != nil {
		return c, err
	}
	if c.row.State != projections.Committed {
		c.defect = "it is " + string(c.row.State) + ", not committed"
		return c, nil
	}
	c.defect, err = j.defect(ctx, c.row)
	return c, err
}

// defect returns what is wrong with the files of a checkpoint, "" if nothing is.
func (j *job) defect(ctx context.Context, c projections.Checkpoint) (string, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return "", err
	}
	report, err := j.examine(ctx, checkpoint.RefOf(c.Run, c.Trial, c.ID), digest, j.held(c))
	// The log vouches for the manifest. If a crash left out a receipt, the owner
	// writes it when it next opens the store.
	found := slices.DeleteFunc(report.Findings, func(f data.Finding) bool { return f.File == checkpoint.ReceiptFile })
	switch n := len(found); {
	case err != nil:
		return "", err
	case n == 0:
		return "", nil
	case report.Files == 0:
		return "none of its files exists", nil
	case n == 1:
		return found[0].String(), nil
	default:
		return fmt.Sprintf("%s, and %d more findings", found[0], n-1), nil
	}
}

// held names the data files whose bytes are in the slots of this node.
func (j *job) held(c projections.Checkpoint) (files []string) {
	if c.Run != j.cfg.Run || c.Trial != j.cfg.Trial {
		return nil
	}
	for _, rank := range j.Staged(c.ID) {
		files = append(files, fmt.Sprintf("r%05d.safetensors", rank))
	}
	return files
}

// examineLimit is how long checking a checkpoint's files may take. The check
// reads no tensor.
const examineLimit = 2 * time.Minute

// examine checks the files of a checkpoint. A disk that does not answer blocks
// only examine's goroutine.
func (j *job) examine(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest, held []string) (data.Report, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, examineLimit, fmt.Errorf("%w within %v: check the disk of the store", session.ErrStuck, examineLimit))
	defer cancel()
	type answer struct {
		report data.Report
		err    error
	}
	answers := make(chan answer, 1)
	go func() {
		report, err := j.look(ctx, ref, manifest, held)
		answers <- answer{report, err}
	}()
	select {
	case a := <-answers:
		return a.report, a.err
	case <-ctx.Done():
		return data.Report{}, context.Cause(ctx)
	}
}

// look returns the findings about the files of a checkpoint, except for files
// that are held in memory. If the job has its own storage, it must first be able
// to read the checkpoint.
func (j *job) look(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest, held []string) (data.Report, error) {
	m, asked, err := j.askStorage(ctx, j.store.Data.Reader(ref).WithManifest(manifest))
	switch {
	case err == nil:
	case errors.Is(err, fs.ErrNotExist) || errors.As(err, new(*data.CorruptError)):
		return data.Report{Files: 1, Findings: []data.Finding{{Kind: data.Unreadable, File: "the job's own storage", Block: -1, Offset: -1, Problem: err.Error()}}}, nil
	default:
		return data.Report{}, fmt.Errorf("checkpoint %s cannot be read now by the job's own storage: %w; start the job again when the storage can read it", ref, err)
	}
	report, err := j.store.Data.VerifyWith(ctx, ref, manifest, data.VerifyOptions{Sizes: true})
	switch {
	case err != nil:
		return data.Report{}, err
	case !asked:
		// A restore reads from this node's slots what they still hold.
		report.Findings = slices.DeleteFunc(report.Findings, func(f data.Finding) bool { return slices.Contains(held, f.File) })
	case !indexed(m, report):
		return data.Report{}, nil // the files are the storage's own, and it has checked them
	}
	return report, nil
}

// askStorage makes the job's own storage take the steps before the plans of a
// restore, if its reader is not the store's own. It returns a panic as an error.
func (j *job) askStorage(ctx context.Context, own *data.FileReader) (m checkpoint.Manifest, asked bool, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("it panicked: %v\n%s", p, debug.Stack())
		}
	}()
	reader := j.store.Reader(own)
	if reader == data.Reader(own) {
		return m, false, nil
	}
	if m, err = reader.ReadMetadata(ctx); err != nil {
		return m, true, err
	}
	return m, true, reader.SetUp(ctx, m, true)
}

// indexed reports whether a rank of a checkpoint has an index file of the store.
func indexed(m checkpoint.Manifest, report data.Report) bool {
	return slices.ContainsFunc(m.Ranks, func(rank checkpoint.RankIndex) bool {
		return !slices.ContainsFunc(report.Findings, func(f data.Finding) bool {
			return f.Kind == data.Missing && f.File == checkpoint.IndexFile(rank.Rank)
		})
	})
}

// wholeFrom returns the newest whole checkpoint at head or before it in the line,
// and records those that it passed over. If no checkpoint is whole it returns
// [ErrNotWhole]; it never falls back to a fresh start.
func (j *job) wholeFrom(ctx context.Context, head string) (string, error) {
	j.passed, j.morePassed = nil, 0
	var first candidate
	for id := head; id != ""; {
		c, err := j.candidate(ctx, id)
		if err != nil {
			return "", fmt.Errorf("find a checkpoint to resume from: %s: %w", id, err)
		}
		if c.defect == "" {
			if n := len(j.passed) + j.morePassed; n > 0 {
				j.log.Warn("resuming from an older checkpoint", "checkpoint", id, "passed_over", n, "newest", head, "reason", first.defect)
			}
			return id, nil
		}
		if first.id == "" {
			first = c
		}
		if len(j.passed) < maxPassedOver {
			j.passed = append(j.passed, events.PassedOver{Checkpoint: id, Reason: session.Beginning(c.defect, session.MaxMessage)})
			j.log.Warn("checkpoint passed over: not whole", "checkpoint", id, "reason", c.defect)
		} else {
			j.morePassed++
		}
		if !c.own(j.cfg.Run, j.cfg.Trial) {
			break // the user chose what the line started from: there is no substitute
		}
		if id, err = j.before(ctx, c.row); err != nil {
			return "", fmt.Errorf("find a checkpoint to resume from: before %s: %w", c.id, err)
		}
	}
	if head == "" {
		return "", nil
	}
	return "", fmt.Errorf("%w: resume run %q: %s: %s; no checkpoint of the line is whole (%d checked); see `ckptstore verify %s`, restore the files from a backup, or start afresh with --resume none",
		ErrNotWhole, j.cfg.Run, first.id, first.defect, len(j.passed)+j.morePassed, j.cfg.Run)
}

// before returns the visible checkpoint of the line before c, or the checkpoint
// that the line started from, or "".
func (j *job) before(ctx context.Context, c projections.Checkpoint) (string, error) {
	for c.ParentSeq > 0 {
		parent, err := j.store.Views.Resolve(ctx, restore.Qualify(j.cfg.Run, j.cfg.Trial, c.Parent))
		if err != nil {
			return "", err
		}
		if parent.Visible() {
			return parent.ID, nil
		}
		if parent.BegunSeq >= c.BegunSeq {
			return "", fmt.Errorf("the parent of %s is not older than it", c.ID)
		}
		c = parent
	}
	return c.Parent, nil
}

// wholeOnly rejects a checkpoint that is not whole: the user asked for this one.
func (j *job) wholeOnly(ctx context.Context, asked, id string) error {
	j.passed, j.morePassed = nil, 0
	c, err := j.candidate(ctx, id)
	if err != nil {
		return fmt.Errorf("--resume %s: %w", asked, err)
	}
	if c.defect == "" {
		return nil
	}
	ref := restore.Qualify(j.cfg.Run, j.cfg.Trial, id)
	run, _, _ := strings.Cut(ref, "@")
	next := fmt.Sprintf("restore its files from a backup, or name another checkpoint that `ckptstore ls %s` lists", run)
	if asked == "require" {
		next = "restore its files from a backup, or resume from the newest whole one with --resume auto"
	}
	return fmt.Errorf("%w: --resume %s: %s: %s; see `ckptstore verify %s`; %s", ErrNotWhole, asked, ref, c.defect, ref, next)
}
