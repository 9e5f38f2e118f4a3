package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
)

// ChangedError says that an adopted file is not what it was when it was
// adopted, so that nothing is known of its bytes any more. None were handed
// out.
type ChangedError struct {
	File               string // path
	Size, WantSize     int64  // in bytes
	Modified, WantTime time.Time
	Gone               bool
}

// Error names the file, what has changed and the next step.
func (e *ChangedError) Error() string {
	what := fmt.Sprintf("it was written at %s, and at %s when it was adopted",
		e.Modified.UTC().Format(time.RFC3339Nano), e.WantTime.UTC().Format(time.RFC3339Nano))
	switch {
	case e.Gone:
		what = "it is not there any more"
	case e.Size != e.WantSize:
		what = fmt.Sprintf("it has %d bytes, and had %d when it was adopted", e.Size, e.WantSize)
	}
	return fmt.Sprintf("adopted file %s has changed: %s; put the old file back, or import it again", e.File, what)
}

// Is makes errors.Is(err, fs.ErrNotExist) hold for a file that is gone.
func (e *ChangedError) Is(target error) bool { return e.Gone && target == fs.ErrNotExist }

// unchanged compares an adopted file with what it was. info is of the open
// file, so that what is read afterwards is what was compared.
func unchanged(x *checkpoint.Index, n int, info object.Info) error {
	want := x.Files[n]
	if info.Size == want.Size && info.Modified.UnixNano() == x.Modified[n] {
		return nil
	}
	return &ChangedError{
		File: want.Name, Size: info.Size, WantSize: want.Size,
		Modified: info.Modified, WantTime: time.Unix(0, x.Modified[n]),
	}
}

// checkUnchanged does that by name.
func (r *Root) checkUnchanged(ctx context.Context, x *checkpoint.Index) error {
	var errs []error
	for n, f := range x.Files {
		info, err := local.Stat(r.outside, f.Name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = &ChangedError{File: f.Name, WantSize: f.Size, Gone: true}
		case err == nil:
			err = unchanged(x, n, info)
		}
		errs = append(errs, err, ctx.Err())
	}
	return errors.Join(errs...)
}
