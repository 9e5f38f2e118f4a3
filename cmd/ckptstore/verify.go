package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/web"
)

// verified is `verify --json`.
type verified struct {
	Store       string    `json:"store"`
	Checkpoints int       `json:"checkpoints"`
	Files       int       `json:"files"`
	Chunks      int       `json:"chunks"`
	Bytes       int64     `json:"bytes"`
	Findings    []finding `json:"findings"`
}

type finding struct {
	Run        string `json:"run"`
	Checkpoint string `json:"checkpoint"`
	storage.Finding
}

func (a *app) verifyCommand() *cobra.Command {
	return &cobra.Command{
		Use: "verify [REF]", Short: "Read every byte of one or all checkpoints and name what is damaged", Args: args(cobra.MaximumNArgs(1)),
		Long: `Read every file of the committed checkpoints, or of REF, and compare it with
what vouches for it: data with the index, the index with the manifest, the
manifest with the log. Damage is named by file, tensor and block; the exit
code is then 6.`,
		RunE: func(c *cobra.Command, refs []string) error {
			return a.with(c.Context(), func(s *store.Store) error { return a.verify(c.Context(), s, refs) })
		},
	}
}

func (a *app) verify(ctx context.Context, s *store.Store, refs []string) error {
	targets, err := verifyTargets(ctx, s, refs)
	if err != nil {
		return err
	}
	out := verified{Store: s.ID, Findings: []finding{}}
	bar := a.progress("verify", targets)
	defer bar.done()
	for _, c := range targets {
		digest, err := plan.ParseDigest(c.Manifest)
		if err != nil {
			return err
		}
		before := out.Bytes
		report, err := s.Data.Verify(ctx, store.RefOf(c), digest, func(n int64) { bar.set(before + n) })
		if err != nil {
			return err
		}
		out.Checkpoints++
		out.Files += report.Files
		out.Chunks += report.Chunks
		out.Bytes += report.Bytes
		for _, f := range report.Findings {
			out.Findings = append(out.Findings, finding{c.Run, c.ID, f})
		}
	}
	bar.done()
	err = emit(a, out, out.Findings, func(w *tabwriter.Writer, _ bool) {
		for _, f := range out.Findings {
			fmt.Fprintf(w, "%s@%s: %s\n", f.Run, f.Checkpoint, f.Finding)
		}
		fmt.Fprintf(w, "%d checkpoints, %d files, %d chunks, %s: %d findings\n",
			out.Checkpoints, out.Files, out.Chunks, size(out.Bytes), len(out.Findings))
	})
	if err == nil && len(out.Findings) > 0 {
		return errFindings
	}
	return err
}

// verifyTargets are the checkpoints that refs name, or all committed ones.
func verifyTargets(ctx context.Context, s *store.Store, refs []string) ([]projections.Checkpoint, error) {
	if len(refs) == 1 {
		c, err := web.Ask(ctx, s.Views(), web.Resolve, web.Params{Ref: refs[0]})
		if err == nil && c.State != projections.Committed {
			err = fmt.Errorf("checkpoint %s@%s is %s: %s", c.Run, c.ID, c.State, c.Reason)
		}
		return []projections.Checkpoint{c}, err
	}
	runs, err := web.Ask(ctx, s.Views(), web.Runs, web.Params{})
	if err != nil {
		return nil, err
	}
	var targets []projections.Checkpoint
	for _, run := range runs {
		rows, err := web.Ask(ctx, s.Views(), web.Checkpoints, web.Params{Run: run.Name, All: true})
		if err != nil {
			return nil, err
		}
		for _, c := range rows {
			if c.State == projections.Committed {
				targets = append(targets, c)
			}
		}
	}
	return targets, nil
}
