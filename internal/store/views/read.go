package views

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

var _ query.Views = (*Views)(nil)

// State is the state of views.
type State struct {
	Cursor uint64 // last sequence that they contain; 0 during a rebuild
	Halted error  // why they no longer follow the log
	Memory bool   // they are in memory because their directory fails
}

// State returns the state of the views.
func (v *Views) State() State {
	_, _, halted := v.present()
	return State{Cursor: v.Cursor(), Halted: halted, Memory: v.o.Dir != "" && v.inMemory()}
}

// Cursor returns the last sequence in the views, 0 during a rebuild.
func (v *Views) Cursor() uint64 {
	if db, _, _ := v.present(); db != nil {
		return db.Cursor()
	}
	return 0
}

// Wait implements [query.Views].
func (v *Views) Wait(ctx context.Context, seq uint64) error {
	for {
		db, changed, halted := v.present()
		if db != nil {
			err := db.Wait(ctx, seq)
			if err == nil || ctx.Err() != nil || !v.gone(db, err) {
				return err
			}
		} else if halted != nil {
			return halted
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for event %d in the views, which are being rebuilt: %w", seq, ctx.Err())
		}
	}
}

// gone reports whether an error of db means its end while the views continue. The follower replaces
// a failed database.
func (v *Views) gone(db *viewdb.DB, err error) bool {
	if !errors.Is(err, viewdb.ErrFailed) && !errors.Is(err, viewdb.ErrClosed) {
		return false
	}
	now, _, halted := v.present()
	return halted == nil && (now != db || v.o.Dir != "" && errors.Is(err, viewdb.ErrFailed))
}

// ViewAt implements [query.Views]. If a failing database interrupts a read, ViewAt repeats it with
// the database that replaces it, unless the read may still be running.
func (v *Views) ViewAt(read func(r projections.Reader, cursor uint64) error) error {
	patient, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		db, changed, halted := v.present()
		if db == nil && halted != nil {
			return halted
		}
		if db != nil {
			v.mu.Lock()
			floor := v.floor
			v.mu.Unlock()
			err := db.Wait(patient, floor)
			var inside atomic.Bool
			if err == nil {
				err = db.ViewAt(func(r projections.Reader, cursor uint64) error {
					inside.Store(true)
					defer inside.Store(false)
					return read(r, cursor)
				})
			}
			switch {
			case err == nil || !v.gone(db, err):
				return err
			case inside.Load():
				return fmt.Errorf("read the views, which failed meanwhile; ask again: %w: %w", context.DeadlineExceeded, err)
			}
		}
		select {
		case <-changed:
		case <-patient.Done():
			return fmt.Errorf("read the views: they are being rebuilt in memory; ask again: %w", patient.Err())
		}
	}
}

// View is [Views.ViewAt] without the sequence.
func (v *Views) View(read func(projections.Reader) error) error {
	return v.ViewAt(func(r projections.Reader, _ uint64) error { return read(r) })
}
