package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
)

// offlineHelp says what a REF may be without a log.
const offlineHelp = `With --offline the receipts in the data directory alone are read, without the
lock, the log or the views. Then RUN and RUN@latest are the checkpoint of the run
that was committed last, perhaps superseded since, and tags and RUN@best:METRIC
are not known.`

// byReceipts reports that the log of the store is not opened, because this process
// may not write there or others can, and warns of it. What the receipts say can be
// read all the same.
func (a *app) byReceipts() bool {
	why := store.ReadOnly(a.location)
	if why != nil {
		a.warn("warning: read by its receipts, as with --offline: %v", why)
	}
	return why != nil
}

// receipts are those of the data directory. One that is damaged is warned of:
// what a reference stands for must not change because of it in silence.
func (a *app) receipts(ctx context.Context) (*data.Root, []checkpoint.Receipt, error) {
	data, err := a.data()
	if err != nil {
		return nil, nil, err
	}
	list, damaged, err := data.Checkpoints(ctx)
	for _, d := range damaged {
		a.warn("left out: %v", d.Problem())
	}
	return data, list, err
}

// withOffline opens what a reference names, without a log.
func (a *app) withOffline(ctx context.Context, ref, fqn string, do func(source) error) error {
	if spelledPath(ref) || strings.Contains(ref, "/") && checkpointAt(ref) {
		return withPath(ctx, ref, do)
	}
	root, list, err := a.receipts(ctx)
	known := slices.ContainsFunc(list, func(r checkpoint.Receipt) bool { return ref == r.Run || strings.HasPrefix(ref, r.Run+"@") })
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
	receipt, err := store.FindReceipt(list, ref)
	if err != nil {
		return err
	}
	return withReader(ctx, root.Reader(receipt.Ref).Only(fqn), source{
		name: receipt.Run + "@" + receipt.Checkpoint, store: receipt.Store, checkpoint: store.RowOf(receipt),
	}, do)
}
