package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/events"
)

// resolveBlobs returns r with the plan in its body inline, so that a pure fold
// can look into it. A claim check that stands for nothing stays: the save of which it
// is fails, and not the training.
func resolveBlobs(ctx context.Context, blobs Blobs, r events.Recorded) (events.Recorded, error) {
	if r.Kind.Family() != "plan" {
		return r, nil
	}
	body, err := r.Body()
	if err != nil {
		return r, err
	}
	var blob *events.Blob
	switch b := body.(type) {
	case *events.LocalPlan:
		blob = &b.Plan
	case *events.GlobalPlan:
		blob = &b.Layout
	}
	if blob == nil || blob.Digest == "" {
		return r, nil
	}
	data, err := blobs.Get(ctx, *blob)
	if errors.Is(err, events.ErrNoBlob) {
		return r, nil
	}
	if err != nil {
		return r, fmt.Errorf("event %d (%s): %w", r.Sequence, r.Kind, err)
	}
	*blob = events.InlineBlob(data)
	if r.Data, err = json.Marshal(body); err != nil {
		return r, fmt.Errorf("event %d (%s): %w", r.Sequence, r.Kind, err)
	}
	return r, nil
}
