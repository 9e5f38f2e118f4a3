package store

import (
	"context"

	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

var _ query.Rows = (*owner)(nil)

// Read implements [query.Rows]: the owner of a store has the rows.
func (o *owner) Read(ctx context.Context, read func(projections.Reader) error) (here bool, err error) {
	own := o.ownership()
	if own == nil || o.life.Err() != nil {
		return false, nil
	}
	rows, ok := own.views.source.(query.Rows)
	if !ok {
		return false, nil
	}
	here, err = rows.Read(ctx, read)
	if err != nil && o.ownership() != own {
		// The store was given up meanwhile: whoever owns it next is asked.
		return false, nil
	}
	return here, err
}
