package data_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
)

// TestDamagedNeighbours damages small tensors that are read together, one after the other, by
// a flipped bit and by a missing end: the error names the damaged tensor.
func TestDamagedNeighbours(t *testing.T) {
	const count, size = 6, 10_000
	m := newModel()
	for i := range count {
		m.full(0, fmt.Sprintf("w%d", i), tensor.Uint8, size)
	}
	fs := memory(t)
	root := open(t, fs)
	m.save(t, root)
	const file = "r00000.safetensors"
	whole := content(t, fs, file)
	first := len(whole) - count*size
	for i := range count {
		name := fmt.Sprintf("w%d", i)
		at := first + i*size + size/2
		flipped := append([]byte(nil), whole...)
		flipped[at] ^= 1
		for what, raw := range map[string][]byte{"a flipped bit": flipped, "a missing end": whole[:at]} {
			put(t, fs, file, raw)
			_, _, err := m.load(t.Context(), root.Reader(ref), m.wantAll())
			var damage *data.CorruptError
			if !errors.As(err, &damage) || damage.FQN != name || damage.Block != 0 || (what == "a missing end") != strings.Contains(damage.Problem, "ends here") {
				t.Errorf("%s in %s: %v", what, name, err)
			}
		}
	}
	put(t, fs, file, whole)
	if n := m.check(t, root.Reader(ref), m.wantAll()); n != count*size {
		t.Errorf("read %d bytes", n)
	}
}
