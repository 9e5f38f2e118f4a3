package main

import (
	"context"
	"fmt"
	"slices"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

const repairHelp = `With --repair, chunks that are damaged get their bytes again, where the same bytes
(by digest, dtype and size) are anywhere in the store, or in a staging slot of
this machine. The file is written whole under another name, compared, synced and
renamed; directories that have a link to the damaged file are repaired with it.
Cut at any moment, it leaves what was there or what is repaired, and can be run
again. What was repaired is verified once more, and with it the checkpoints that
were committed meanwhile; the exit code is 6 if findings are left. While another
process repairs the store it is 11. Manifests, indexes and adopted files are not
repaired.`

// repaired is a file of `verify --repair --json`.
type repaired struct {
	Run        string          `json:"run"`
	Checkpoint string          `json:"checkpoint"`
	File       string          `json:"file"`
	Chunks     []repairedChunk `json:"chunks"`          // that have their bytes again
	Links      []string        `json:"links,omitempty"` // paths of other checkpoints' links to it, repaired with it
	From       string          `json:"from,omitempty"`  // path of the whole file that was linked in
}

type repairedChunk struct {
	FQN   string `json:"fqn"`
	Chunk string `json:"chunk,omitempty"` // box of a tensor's chunk
	Bytes int64  `json:"bytes"`
	From  string `json:"from"` // path of the file, or of the staging slot
}

// unrepaired is damage that `verify --repair` could not undo.
type unrepaired struct {
	Run        string `json:"run"`
	Checkpoint string `json:"checkpoint"`
	File       string `json:"file"`
	FQN        string `json:"fqn,omitempty"`
	Chunk      string `json:"chunk,omitempty"`
	Reason     string `json:"reason"`
}

var _ data.ChunkSource = (*staging.SealedChunks)(nil)

// repair repairs what the reports have found, from what every committed
// checkpoint has, and says which checkpoints are to be verified again.
func (a *app) repair(ctx context.Context, s *store.Store, targets, every []projections.Checkpoint, reports []data.Report, out *verified) (again []projections.Checkpoint, err error) {
	var all []data.Target
	byRef := map[checkpoint.Ref]projections.Checkpoint{}
	for _, c := range every {
		digest, err := checkpoint.ParseDigest(c.Manifest)
		if err != nil {
			return nil, fmt.Errorf("checkpoint %s@%s: %w", c.Run, c.ID, err)
		}
		all = append(all, data.Target{Ref: store.RefOf(c), Manifest: digest})
		byRef[store.RefOf(c)] = c
	}
	damaged := map[checkpoint.Ref][]string{}
	for i, c := range targets {
		for _, f := range reports[i].Findings {
			damaged[store.RefOf(c)] = append(damaged[store.RefOf(c)], f.File)
		}
	}
	if len(damaged) == 0 {
		return nil, nil
	}
	shared, _ := shm.Dir()
	slots, err := staging.OpenSealedChunks(shared, s.ID)
	if err != nil {
		return nil, err
	}
	defer slots.Close()
	done, err := s.Data.Repair(ctx, damaged, all, slots)
	if err != nil {
		return nil, err
	}
	for _, f := range done.Files {
		c := byRef[f.Ref]
		r := repaired{Run: c.Run, Checkpoint: c.ID, File: f.File, Chunks: []repairedChunk{}, Links: f.Links, From: f.From}
		for _, ch := range f.Chunks {
			r.Chunks = append(r.Chunks, repairedChunk(ch))
		}
		out.Repaired = append(out.Repaired, r)
	}
	for _, u := range done.Left {
		c := byRef[u.Ref]
		out.Unrepaired = append(out.Unrepaired, unrepaired{c.Run, c.ID, u.File, u.FQN, u.Chunk, u.Reason})
	}
	for _, c := range targets {
		if len(damaged[store.RefOf(c)]) > 0 {
			again = append(again, c)
		}
	}
	return again, nil
}

// repairAndVerify repairs what the reports have found, and replaces those reports
// by what is found afterwards. Checkpoints that are committed and were not before
// may have links to what was damaged: they are verified too, and returned behind
// the rest.
func (a *app) repairAndVerify(ctx context.Context, s *store.Store, before, targets []projections.Checkpoint, reports []data.Report, out *verified) ([]projections.Checkpoint, []data.Report, error) {
	every, err := verifyTargets(ctx, s, nil)
	if err != nil {
		return nil, nil, err
	}
	again, err := a.repair(ctx, s, targets, every, reports, out)
	if err != nil || len(again) == 0 {
		return targets, reports, err
	}
	if every, err = verifyTargets(ctx, s, nil); err != nil {
		return nil, nil, err
	}
	fresh := slices.DeleteFunc(every, func(c projections.Checkpoint) bool {
		is := func(known projections.Checkpoint) bool { return store.RefOf(known) == store.RefOf(c) }
		return slices.ContainsFunc(before, is) || slices.ContainsFunc(targets, is)
	})
	again = append(again, fresh...)
	bar := a.Progress("verify repairs", bytesOf(again))
	defer bar.Done()
	after, err := s.VerifyAll(ctx, again, store.VerifyOptions{Progress: bar.Set})
	if err != nil {
		return nil, nil, err
	}
	now := map[checkpoint.Ref]data.Report{}
	for i, c := range again {
		now[store.RefOf(c)] = after[i]
	}
	for i, c := range targets {
		if report, ok := now[store.RefOf(c)]; ok {
			reports[i] = report
		}
	}
	return append(targets, fresh...), append(reports, after[len(again)-len(fresh):]...), nil
}

// printRepairs prints what was repaired and what was not.
func (v verified) printRepairs(w *tabwriter.Writer) {
	for _, r := range v.Repaired {
		switch {
		case r.From != "":
			fmt.Fprintf(w, "%s@%s: %s: repaired: linked to %s, which is whole\n", r.Run, r.Checkpoint, r.File, r.From)
		case len(r.Chunks) == 0:
			fmt.Fprintf(w, "%s@%s: %s: repaired: its size and header are as they were\n", r.Run, r.Checkpoint, r.File)
		}
		for _, c := range r.Chunks {
			fmt.Fprintf(w, "%s@%s: %s: repaired %q %s, %s from %s\n", r.Run, r.Checkpoint, r.File, c.FQN, c.Chunk, bytesize.Text(c.Bytes), c.From)
		}
		for _, path := range r.Links {
			fmt.Fprintf(w, "%s@%s: %s: repaired too: %s\n", r.Run, r.Checkpoint, r.File, path)
		}
	}
	for _, u := range v.Unrepaired {
		fmt.Fprintf(w, "%s@%s: %s: not repaired", u.Run, u.Checkpoint, u.File)
		if u.FQN != "" {
			fmt.Fprintf(w, " %q %s", u.FQN, u.Chunk)
		}
		fmt.Fprintf(w, ": %s\n", u.Reason)
	}
}
