package checkpoint_test

import (
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// TestDecodeManifestOf gives of one tensor what the whole form gives, of others
// the same or no chunks, and refuses what that refuses.
func TestDecodeManifestOf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := manifests().Draw(t, "manifest")
		data := checkpoint.EncodeManifest(m)
		if rapid.Bool().Draw(t, "damaged") {
			data[rapid.IntRange(0, len(data)-1).Draw(t, "at")] ^= rapid.Byte().Draw(t, "by")
		}
		fqn := "w"
		if n := len(m.Layout.Tensors); n > 0 {
			fqn = m.Layout.Tensors[rapid.IntRange(0, n-1).Draw(t, "tensor")].FQN
		}
		want, whole := checkpoint.DecodeManifest(data)
		got, err := checkpoint.DecodeManifestOf(data, fqn)
		if (err == nil) != (whole == nil) {
			t.Fatalf("error %v, of the whole %v", err, whole)
		}
		for i := range got.Layout.Tensors {
			if one := &got.Layout.Tensors[i]; one.FQN != fqn && one.Chunks == nil {
				one.Chunks = want.Layout.Tensors[i].Chunks
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v\nwant %+v", got, want)
		}
	})
}
