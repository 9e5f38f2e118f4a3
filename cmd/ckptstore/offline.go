package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/store"
)

// offlineHelp says what a REF may be without a log.
const offlineHelp = `With --offline the receipts in the data directory alone are read, without the
lock, the log or the views. Then RUN and RUN@latest are the checkpoint of the run
that was committed last, perhaps superseded since, and tags and RUN@best:METRIC
are not known.`

// minPrefix is how much of an ID names a checkpoint, as with a log.
const minPrefix = 4

// receipts are those of the data directory. One that is damaged is warned of:
// what a reference stands for must not change because of it in silence.
func (a *app) receipts(ctx context.Context) (*storage.Root, []storage.Receipt, error) {
	data, err := a.data()
	if err != nil {
		return nil, nil, err
	}
	list, damaged, err := data.Checkpoints(ctx)
	for _, d := range damaged {
		a.warn("%s is left out: %v: open the store once with its log, which writes the receipt again", d.File, d.Err)
	}
	return data, list, err
}

// withOffline opens what a reference names, without a log.
func (a *app) withOffline(ctx context.Context, ref, fqn string, do func(source) error) error {
	if spelledPath(ref) || strings.Contains(ref, "/") && checkpointAt(ref) {
		return withPath(ctx, ref, do)
	}
	data, list, err := a.receipts(ctx)
	known := slices.ContainsFunc(list, func(r storage.Receipt) bool { return ref == r.Run || strings.HasPrefix(ref, r.Run+"@") })
	switch at := checkpointAt(ref); {
	case at && errors.Is(err, store.ErrNoStore) && !a.named:
		return withPath(ctx, ref, do)
	case err != nil:
		return err
	case at && known:
		return usageError{fmt.Errorf("%q is a run of the store %s and a path: say ./%s, or %s@latest in another directory", ref, jetlog.Redacted(a.location), ref, ref)}
	case at:
		return withPath(ctx, ref, do)
	}
	receipt, err := offlineRef(list, ref)
	if err != nil {
		return err
	}
	return withReader(ctx, data.Reader(receipt.Ref).Only(fqn), source{
		name: receipt.Run + "@" + receipt.Checkpoint, store: receipt.Store,
		checkpoint: projections.Checkpoint{
			Run: receipt.Run, Trial: receipt.Trial, ID: receipt.Checkpoint, Name: receipt.Name, Step: receipt.Step, Attempt: receipt.Attempt,
			State: projections.Committed, Manifest: receipt.Manifest.String(), CommittedSeq: receipt.Sequence, EndedAt: receipt.CommittedAt,
		},
	}, do)
}

// offlineRef is the receipt that a reference stands for. The forms are tried in
// the order of [projections.Resolve].
func offlineRef(list []storage.Receipt, ref string) (storage.Receipt, error) {
	list = slices.Clone(list)
	slices.SortFunc(list, func(x, y storage.Receipt) int { return cmp.Compare(y.Sequence, x.Sequence) })
	if of := receiptsOf(list, ref); len(of) > 0 {
		return oneReceipt(ref, of, "latest")
	}
	for end := strings.LastIndexByte(ref, '@'); end >= 0; end = strings.LastIndexByte(ref[:end], '@') {
		if of := receiptsOf(list, ref[:end]); len(of) > 0 {
			return oneReceipt(ref, of, ref[end+1:])
		}
	}
	if strings.Contains(ref, "@") {
		return storage.Receipt{}, &projections.NotFoundError{What: "run", Ref: ref, Hint: "no receipt names it; `ckptstore ls --offline` lists those that there are"}
	}
	return oneReceipt(ref, list, ref)
}

// receiptsOf are those of RUN, or of RUN/TRIAL. Of a run with several trials
// "main" is meant, as with a log.
func receiptsOf(list []storage.Receipt, name string) []storage.Receipt {
	where := func(is func(storage.Receipt) bool) (of []storage.Receipt) {
		for _, r := range list {
			if is(r) {
				of = append(of, r)
			}
		}
		return of
	}
	of := where(func(r storage.Receipt) bool { return r.Run == name })
	if main := where(func(r storage.Receipt) bool { return r.Run == name && r.Trial == projections.DefaultTrial }); len(main) > 0 {
		return main
	}
	if len(of) > 0 {
		return of
	}
	return where(func(r storage.Receipt) bool { return r.Run+"/"+r.Trial == name })
}

// oneReceipt is the one of a list, the newest first, that the right side of a
// reference means.
func oneReceipt(ref string, list []storage.Receipt, what string) (storage.Receipt, error) {
	if strings.HasPrefix(what, "best:") {
		return storage.Receipt{}, fmt.Errorf("%w: %s: which is the best is in the log, and --offline reads none", projections.ErrReference, ref)
	}
	if what == "latest" {
		return oneTrial(ref, list)
	}
	for _, matches := range []func(storage.Receipt) bool{
		func(r storage.Receipt) bool { return r.Checkpoint == what },
		func(r storage.Receipt) bool { return r.Name == what },
	} {
		if of := slices.DeleteFunc(slices.Clone(list), func(r storage.Receipt) bool { return !matches(r) }); len(of) > 0 {
			return oneTrial(ref, of)
		}
	}
	var of []storage.Receipt
	for _, r := range list {
		if len(what) >= minPrefix && strings.HasPrefix(r.Checkpoint, what) {
			of = append(of, r)
		}
	}
	if len(of) == 1 {
		return of[0], nil
	}
	if len(of) > 1 {
		return storage.Receipt{}, &projections.AmbiguousError{Ref: ref, Candidates: candidates(of)}
	}
	return storage.Receipt{}, &projections.NotFoundError{What: "checkpoint", Ref: ref, Hint: "no receipt names it, and tags are in the log alone; `ckptstore ls --offline` lists those that there are"}
}

// oneTrial is the newest, if all are of one trial.
func oneTrial(ref string, of []storage.Receipt) (storage.Receipt, error) {
	for _, r := range of[1:] {
		if r.Run != of[0].Run || r.Trial != of[0].Trial {
			return storage.Receipt{}, &projections.AmbiguousError{Ref: ref, Candidates: candidates(of)}
		}
	}
	return of[0], nil
}

func candidates(of []storage.Receipt) (names []string) {
	for _, r := range of {
		names = append(names, r.Run+"/"+r.Trial+"@"+r.Checkpoint)
	}
	return names
}
