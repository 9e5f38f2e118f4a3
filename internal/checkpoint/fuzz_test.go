package checkpoint_test

import (
	"math"
	"testing"
)

func fuzzForm(f *testing.F, form form) {
	f.Add(form.sample)
	f.Add(form.sample[:len(form.sample)/2])
	f.Add(raw(form.magic))
	f.Add(raw(form.magic, 0, 0))
	f.Add(raw(form.magic, math.MaxInt64, math.MaxInt64))
	for _, at := range []int{4, 5, 7, len(form.sample) / 2, len(form.sample) - 1} {
		bad := append([]byte(nil), form.sample...)
		bad[at] ^= 0x81
		f.Add(bad)
	}
	f.Fuzz(func(t *testing.T, data []byte) { checkDecode(t, form, data) })
}

func FuzzDecodeLocal(f *testing.F)    { fuzzForm(f, forms[0]) }
func FuzzDecodeLayout(f *testing.F)   { fuzzForm(f, forms[1]) }
func FuzzDecodeManifest(f *testing.F) { fuzzForm(f, forms[2]) }
