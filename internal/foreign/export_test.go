package foreign

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/cockroachdb/pebble/v2/vfs"
)

func openForeign(t *testing.T, dir string) *data.Foreign {
	t.Helper()
	f, err := Open(t.Context(), vfs.Default, dir)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// same compares everything that two readers give.
func same(t *testing.T, got, want data.Reader, values bool) {
	t.Helper()
	gotM, err := got.ReadMetadata(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wantM, err := want.ReadMetadata(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	gotBytes, err := contents(t.Context(), got, gotM)
	if err != nil {
		t.Fatal(err)
	}
	wantBytes, err := contents(t.Context(), want, wantM)
	if err != nil {
		t.Fatal(err)
	}
	paths := func(l checkpoint.Layout) map[string]string {
		out := map[string]string{}
		for _, tn := range l.Tensors {
			out[tn.FQN] = tn.Path.String()
		}
		for _, v := range l.Values {
			out[v.FQN] = v.Path.String()
		}
		return out
	}
	gotPaths := paths(gotM.Layout)
	for fqn, path := range paths(wantM.Layout) {
		have, ok := gotPaths[fqn]
		switch {
		case !ok && values:
			t.Errorf("%q is missing", fqn)
		case ok && !bytes.Equal(gotBytes[fqn], wantBytes[fqn]):
			t.Errorf("%q has other bytes", fqn)
		case ok && values && have != path:
			t.Errorf("%q has path %s, want %s", fqn, have, path)
		}
	}
	if len(gotM.Layout.Tensors) != len(wantM.Layout.Tensors) {
		t.Errorf("%d tensors, want %d", len(gotM.Layout.Tensors), len(wantM.Layout.Tensors))
	}
}

func TestExportOfPyTorchIsTheSame(t *testing.T) {
	for name, f := range fixtures(t) {
		from := openForeign(t, f.dir)
		for _, format := range []data.Format{data.DCP, data.SafeTensors, data.HuggingFace} {
			t.Run(name+"/"+string(format), func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "a", "b")
				out, err := Export(t.Context(), from, vfs.Default, dir, ExportOptions{Format: format, MaxShard: 300})
				var unfit *UnfitError
				if lacks := slices.ContainsFunc(from.Manifest().Layout.Tensors, func(t checkpoint.Tensor) bool {
					_, has := safetensors.TypeOf(t.DType)
					return !has
				}); lacks && format != data.DCP {
					if !errors.As(err, &unfit) {
						t.Errorf("types that the format lacks: %v", err)
					}
					if _, err := os.Stat(dir); !os.IsNotExist(err) {
						t.Errorf("something was written: %v", err)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				back := openForeign(t, dir)
				f.check(t, back)
				same(t, back, from, format == data.DCP)
				if format == data.DCP {
					if report, err := back.Verify(t.Context(), nil); err != nil || !report.Clean() {
						t.Errorf("%v %v", report.Findings, err)
					}
				} else if len(out.LeftOut) != len(from.Manifest().Layout.Values) {
					t.Errorf("left out %v, want %v", out.LeftOut, from.Manifest().Layout.Values)
				}
				left, err := filepath.Glob(filepath.Join(filepath.Dir(dir), "*"))
				if err != nil || len(left) != 1 {
					t.Errorf("%v are there: %v", left, err)
				}
			})
		}
	}
}
