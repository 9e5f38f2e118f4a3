package viewdb

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/projections"
)

// An overlay and the database behind it act as one table, wherever a batch ends.
func TestOverlayIsOneTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		db, err := pebble.Open("views", &pebble.Options{FS: vfs.NewMem()})
		if err != nil {
			t.Fatal(err)
		}
		o, model := newOverlay(db), projections.NewMemory()
		defer func() {
			if err := errors.Join(o.close(), db.Close()); err != nil {
				t.Fatal(err)
			}
		}()
		keys := rapid.Custom(func(t *rapid.T) []byte {
			return []byte(rapid.StringOfN(rapid.RuneFrom([]rune("abc")), 1, 3, -1).Draw(t, "key"))
		})
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			k := keys.Draw(t, "key")
			switch rapid.IntRange(0, 4).Draw(t, "op") {
			case 0, 1:
				v := []byte(rapid.StringN(0, 3, -1).Draw(t, "value"))
				err = errors.Join(o.Set(k, v), model.Set(k, v))
			case 2:
				err = errors.Join(o.Delete(k), model.Delete(k))
			case 3:
				hi, most := keys.Draw(t, "hi"), rapid.IntRange(1, 20).Draw(t, "most")
				if got, want := rows(t, o, k, hi, most), rows(t, model, k, hi, most); !slices.Equal(got, want) {
					t.Fatalf("scan from %q to %q visits %q, want %q", k, hi, got, want)
				}
			case 4:
				b := db.NewBatch()
				err = errors.Join(o.write(b), b.Commit(pebble.NoSync), b.Close(), o.close())
				o = newOverlay(db)
			}
			if err != nil {
				t.Fatal(err)
			}
			got, err1 := o.Get(k)
			want, err2 := model.Get(k)
			if err := errors.Join(err1, err2); err != nil || string(got) != string(want) || (got == nil) != (want == nil) {
				t.Fatalf("get %q is %q, want %q: %v", k, got, want, err)
			}
		}
		if got, want := rows(t, o, nil, nil, 1000), rows(t, model, nil, nil, 1000); !slices.Equal(got, want) {
			t.Fatalf("the rows are %q, want %q", got, want)
		}
	})
}

// rows lists at most so many rows of a scan. Each visit scans, too.
func rows(t *rapid.T, r projections.Reader, lo, hi []byte, most int) []string {
	stop := errors.New("stop")
	var got []string
	err := r.Scan(lo, hi, func(key, value []byte) error {
		within := 0
		err := r.Scan(key, nil, func([]byte, []byte) error { within++; return nil })
		got = append(got, fmt.Sprintf("%s=%s, %d from there on", key, value, within))
		if len(got) == most {
			err = errors.Join(err, stop)
		}
		return err
	})
	if err != nil && !errors.Is(err, stop) {
		t.Fatal(err)
	}
	return got
}
