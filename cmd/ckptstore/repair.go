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

const repairHelp = `With --repair, damaged chunks are restored from other places with the same bytes (by
digest, dtype and size): elsewhere in the store, or in a staging slot on this machine.
Each file is rewritten under a temporary name, verified, synced and renamed; every
hard link to the damaged file is repaired with it. An interrupted repair leaves each
file either as it was or repaired, and can be run again. Afterwards the repaired
checkpoints, and those that were committed meanwhile, are verified again; the exit code
is 6 if damage remains. While another process repairs the store, the exit code is 11.
Manifests, indexes and files that were imported in place are not repaired.`

// repaired is a file in the output of `verify --repair --json`.
type repaired struct {
	Run        string          `json:"run"`
	Trial      string          `json:"trial"`
	Checkpoint string          `json:"checkpoint"`
	File       string          `json:"file"`
	Chunks     []repairedChunk `json:"chunks"`          // that were restored
	Links      []string        `json:"links,omitempty"` // paths of other checkpoints' links to the file, repaired with it
	From       string          `json:"from,omitempty"`  // path of the intact file that was linked in its place
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
	Trial      string `json:"trial"`
	Checkpoint string `json:"checkpoint"`
	File       string `json:"file"`
	FQN        string `json:"fqn,omitempty"`
	Chunk      string `json:"chunk,omitempty"`
	Reason     string `json:"reason"`
}

var _ data.ChunkSource = (*staging.SealedChunks)(nil)

// repair repairs the damage in reports, from the data of all committed checkpoints
// (every). It returns the checkpoints that must be verified again.
func (a *app) repair(ctx context.Context, s *store.Store, targets, every []projections.Checkpoint, reports []data.Report, out *verified) (again []projections.Checkpoint, err error) {
	var all []data.Target
	byRef := map[checkpoint.Ref]projections.Checkpoint{}
	for _, c := range every {
		digest, err := checkpoint.ParseDigest(c.Manifest)
		if err != nil {
			return nil, fmt.Errorf("checkpoint %s: %w", refOf(c.Run, c.Trial, c.ID), err)
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
		r := repaired{Run: c.Run, Trial: c.Trial, Checkpoint: c.ID, File: f.File, Chunks: []repairedChunk{}, Links: f.Links, From: f.From}
		for _, ch := range f.Chunks {
			r.Chunks = append(r.Chunks, repairedChunk(ch))
		}
		out.Repaired = append(out.Repaired, r)
	}
	for _, u := range done.Left {
		c := byRef[u.Ref]
		out.Unrepaired = append(out.Unrepaired, unrepaired{c.Run, c.Trial, c.ID, u.File, u.FQN, u.Chunk, u.Reason})
	}
	for _, c := range targets {
		if len(damaged[store.RefOf(c)]) > 0 {
			again = append(again, c)
		}
	}
	return again, nil
}

// repairAndVerify repairs the damage in reports, verifies the repaired checkpoints and
// replaces their reports. Checkpoints that were committed meanwhile may have links to
// damaged files: it verifies them too, and returns them after the others.
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

// printRepairs lists repaired and unrepaired files.
func (v verified) printRepairs(w *tabwriter.Writer) {
	for _, r := range v.Repaired {
		switch {
		case r.From != "":
			fmt.Fprintf(w, "%s: %s: repaired: linked to the intact file %s\n", refOf(r.Run, r.Trial, r.Checkpoint), r.File, r.From)
		case len(r.Chunks) == 0:
			fmt.Fprintf(w, "%s: %s: repaired: size and header restored\n", refOf(r.Run, r.Trial, r.Checkpoint), r.File)
		}
		for _, c := range r.Chunks {
			fmt.Fprintf(w, "%s: %s: repaired %q %s, %s from %s\n", refOf(r.Run, r.Trial, r.Checkpoint), r.File, c.FQN, c.Chunk, bytesize.Text(c.Bytes), c.From)
		}
		for _, path := range r.Links {
			fmt.Fprintf(w, "%s: %s: also repaired: %s\n", refOf(r.Run, r.Trial, r.Checkpoint), r.File, path)
		}
	}
	for _, u := range v.Unrepaired {
		fmt.Fprintf(w, "%s: %s: not repaired", refOf(u.Run, u.Trial, u.Checkpoint), u.File)
		if u.FQN != "" {
			fmt.Fprintf(w, " %q %s", u.FQN, u.Chunk)
		}
		fmt.Fprintf(w, ": %s\n", u.Reason)
	}
}
