package main

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
)

// verifyReceipts verifies what the receipts say is committed, when the log does
// not open and why is known. On a server, where the data lies is in the log.
func (a *app) verifyReceipts(ctx context.Context, why error, o verifyFlags) error {
	out := verified{Quick: o.quick, Findings: []finding{logFinding(why)}}
	if store.IsURL(a.location) {
		a.warn("where the data lies is in the log, so none of it was read")
		return a.printVerified(out)
	}
	data, err := a.data()
	if err != nil {
		return errors.Join(why, err)
	}
	receipts, damaged, err := data.Checkpoints(ctx)
	if err != nil {
		return errors.Join(why, err)
	}
	out.addDamaged(damaged)
	if err := a.verifyEach(ctx, data, receipts, &out); err != nil {
		return errors.Join(why, err)
	}
	return a.printVerified(out)
}

// verifyOffline verifies what the receipts say is committed, or one of that.
func (a *app) verifyOffline(ctx context.Context, refs []string, o verifyFlags) error {
	out := verified{Quick: o.quick, Findings: []finding{}}
	if len(refs) == 1 {
		return a.withOffline(ctx, refs[0], all, func(s source) error {
			if s.foreign != nil {
				return a.verifyPath(ctx, refs[0])
			}
			r := s.reader.(*data.FileReader)
			receipt, err := r.Root().Receipt(ctx, store.RefOf(s.checkpoint))
			if err == nil {
				err = a.verifyEach(ctx, r.Root(), []checkpoint.Receipt{receipt}, &out)
			}
			if err != nil {
				return err
			}
			return a.printVerified(out)
		})
	}
	data, err := a.data()
	if err != nil {
		return err
	}
	receipts, damaged, err := data.Checkpoints(ctx)
	if err != nil {
		return err
	}
	out.addDamaged(damaged)
	if err := a.verifyEach(ctx, data, receipts, &out); err != nil {
		return err
	}
	return a.printVerified(out)
}

func (v *verified) addDamaged(damaged []data.Damaged) {
	for _, d := range damaged {
		kind, file := data.Corrupt, checkpoint.ReceiptFile
		if d.Link() {
			kind, file = data.Unreadable, d.File
		}
		v.Findings = append(v.Findings, finding{Run: d.Ref.Run, Checkpoint: d.Ref.Checkpoint, Finding: data.Finding{
			Kind: kind, File: file, Block: -1, Offset: -1, Problem: d.Err.Error(),
		}})
	}
}

// verifyEach verifies checkpoints by their receipts.
func (a *app) verifyEach(ctx context.Context, data *data.Root, receipts []checkpoint.Receipt, out *verified) error {
	bar := a.progressOf("verify", 0)
	defer bar.done()
	reports, err := store.VerifyReceipts(ctx, data, receipts, store.VerifyOptions{Quick: out.Quick, Progress: bar.set})
	if err != nil {
		return err
	}
	for i, r := range receipts {
		out.Store = r.Store
		out.add(r.Run, r.Checkpoint, reports[i])
	}
	return nil
}

// add counts what was verified of one checkpoint.
func (v *verified) add(run, checkpoint string, report data.Report) {
	v.Checkpoints++
	v.Files += report.Files
	v.Chunks += report.Chunks
	v.Bytes += report.Bytes
	v.Read += report.Read
	for _, sums := range report.Sums {
		if sums.New {
			v.Learned = append(v.Learned, learned{run, checkpoint, sums.Name})
		}
	}
	for _, f := range report.Findings {
		v.Findings = append(v.Findings, finding{Run: run, Checkpoint: checkpoint, Finding: f})
	}
}

func logFinding(damage error) finding {
	return finding{Finding: data.Finding{Kind: logDamage, File: "log", Block: -1, Offset: -1, Problem: damage.Error()}}
}
