package viewdb

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/projections"
)

// Each keyframe is the table as of its sequence, for keys that begin with one another and have
// zeros, also after versions were thinned out.
func TestKeyframesAreTables(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		db, err := pebble.Open("views", &pebble.Options{FS: vfs.NewMem()})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := db.Close(); err != nil && !t.Failed() { // a failed test leaves iterators open
				t.Fatal(err)
			}
		}()
		keys := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 2, 'a', 0xff}), 1, 4)
		model, was := projections.NewMemory(), map[uint64]*projections.Memory{0: projections.NewMemory()}
		var c *changes
		at := uint64(0)
		for range rapid.IntRange(1, 20).Draw(t, "keyframes") {
			if c == nil || rapid.Bool().Draw(t, "another stretch") {
				if c != nil {
					if err := c.close(); err != nil {
						t.Fatal(err)
					}
				}
				c = newChanges(&frame{iterators: iterators{from: db}, at: at})
			}
			for range rapid.IntRange(0, 6).Draw(t, "changes") {
				k := keys.Draw(t, "key")
				if rapid.IntRange(0, 2).Draw(t, "op") == 0 {
					err = errors.Join(c.Delete(k), model.Delete(k))
				} else {
					v := []byte(rapid.StringN(0, 3, -1).Draw(t, "value"))
					err = errors.Join(c.Set(k, v), model.Set(k, v))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			at++
			b := db.NewBatch()
			if err := errors.Join(c.write(b, at), b.Commit(pebble.NoSync), b.Close()); err != nil {
				t.Fatal(err)
			}
			was[at] = model.Clone()
		}
		equal := func(every uint64) {
			for at, want := range was {
				if at%every != 0 {
					continue
				}
				f := &frame{iterators: iterators{from: db}, at: at}
				got := &overlay{behind: f, rows: projections.NewMemory()}
				lo, hi := keys.Draw(t, "lo"), keys.Draw(t, "hi")
				for _, r := range [][2][]byte{{nil, nil}, {lo, hi}, {lo, nil}} {
					if got, want := rows(t, got, r[0], r[1], 1000), rows(t, want, r[0], r[1], 1000); !slices.Equal(got, want) {
						t.Fatalf("keyframe %d of every %d from %q to %q has %q, want %q", at, every, r[0], r[1], got, want)
					}
				}
				g, err1 := got.Get(lo)
				w, err2 := want.Get(lo)
				if err := errors.Join(err1, err2); err != nil || string(g) != string(w) || (g == nil) != (w == nil) {
					t.Fatalf("keyframe %d has %q at %q, want %q: %v", at, g, lo, w, err)
				}
				if err := got.close(); err != nil {
					t.Fatal(err)
				}
			}
		}
		equal(1)
		least(t, db, 1)
		if err := c.close(); err != nil {
			t.Fatal(err)
		}
		for _, every := range []uint64{2, 4} {
			// An interrupted pass changes no keyframe that stays.
			stopped := errors.New("stopped")
			if err := thin(db, db, every, rapid.Uint32Range(1, 9).Draw(t, "batch"), func() error { return stopped }); !errors.Is(err, stopped) {
				t.Fatal(err)
			}
			equal(every)
			if err := thin(db, db, every, 1, func() error { return nil }); err != nil {
				t.Fatal(err)
			}
			equal(every)
			least(t, db, every)
		}
	})
}

// least fails if a version serves no keyframe at a multiple of every, or removes a row that was
// not there.
func least(t *rapid.T, db *pebble.DB, every uint64) {
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: firstVersion, UpperBound: lastVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(it.Error(), it.Close()); err != nil {
			t.Fatal(err)
		}
	}()
	row, newer, mark := "", uint64(0), present
	for it.First(); it.Valid(); it.Next() {
		versions, at, err := cutVersion(it.Key())
		if err != nil {
			t.Fatal(err)
		}
		if string(versions) != row && mark == removed {
			t.Fatalf("the oldest version of %q is a removal", rowOf(nil, []byte(row)))
		}
		value, err := it.ValueAndErr()
		if err != nil {
			t.Fatal(err)
		}
		mark = value[len(value)-1]
		if string(versions) == row && newer <= (at+every-1)/every*every {
			t.Fatalf("version %d of %q is hidden by version %d at every keyframe of %d", at, rowOf(nil, versions), newer, every)
		}
		row, newer = string(versions), at
	}
	if mark == removed {
		t.Fatalf("the oldest version of %q is a removal", rowOf(nil, []byte(row)))
	}
}

// A damaged version is reported, not skipped.
func TestDamagedVersion(t *testing.T) {
	db, err := pebble.Open("views", &pebble.Options{FS: vfs.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	if err := db.Set(append(slices.Clone(firstVersion), "row"...), []byte{present}, pebble.NoSync); err != nil {
		t.Fatal(err)
	}
	f := &frame{iterators: iterators{from: db}, at: 1}
	it, err := f.scan(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if it.Valid() || it.Error() == nil {
		t.Errorf("row %q, error %v", it.Key(), it.Error())
	}
	if err := errors.Join(it.Close(), f.close()); err != nil {
		t.Fatal(err)
	}
	if err := thin(db, db, 2, 1, t.Context().Err); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("thinned: %v", err)
	}
}

// A row that was removed again and again leaves nothing when what it had is thinned out. A pass that
// removes nothing can be ended, too.
func TestThin(t *testing.T) {
	db, err := pebble.Open("views", &pebble.Options{FS: vfs.NewMem()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	put := func(row string, at uint64, mark byte) {
		t.Helper()
		if err := db.Set(version(versionsOf(nil, []byte(row)), at), []byte{mark}, pebble.NoSync); err != nil {
			t.Fatal(err)
		}
	}
	left := func() (n int) {
		t.Helper()
		it, err := db.NewIter(&pebble.IterOptions{LowerBound: firstVersion, UpperBound: lastVersion})
		if err != nil {
			t.Fatal(err)
		}
		for it.First(); it.Valid(); it.Next() {
			n++
		}
		if err := it.Close(); err != nil {
			t.Fatal(err)
		}
		return n
	}
	put("gone", 1, present)
	put("gone", 2, removed)
	put("gone", 3, removed)
	if err := thin(db, db, 2, 100, t.Context().Err); err != nil || left() != 0 {
		t.Errorf("%d versions of a removed row, %v", left(), err)
	}
	for i := range 10 {
		put(string(rune('a'+i)), 2, present)
	}
	calls, enough := 0, errors.New("enough")
	err = thin(db, db, 2, 2, func() error {
		if calls++; calls == 3 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) || left() != 10 {
		t.Errorf("%d calls, %v; %d versions", calls, err, left())
	}
}
