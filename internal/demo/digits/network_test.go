package digits

import (
	"bytes"
	"compress/gzip"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// The gradient is checked against central differences of the loss. The loss
// comes from float32 sums, hence the width of a step and the tolerance.
func TestGradient(t *testing.T) {
	const width = 1e-2
	random := rand.New(rand.NewPCG(1, 2))
	w := newWeights()
	for i := range w.flat {
		w.flat[i] = float32(random.NormFloat64()) * 0.2
	}
	samples := embedded().train[:12]
	grad := newWeights()
	for i := range samples {
		w.backward(&samples[i].pixels, samples[i].label, grad)
	}
	loss := func() float64 {
		sum, unused := 0.0, newWeights()
		for i := range samples {
			sum += w.backward(&samples[i].pixels, samples[i].label, unused)
		}
		return sum
	}
	checked := 0
	for _, s := range specs {
		step := 1 + s.size()/300
		for i := 0; i < s.size(); i += step {
			at := s.offset + i
			old := w.flat[at]
			w.flat[at] = old + width
			high := loss()
			w.flat[at] = old - width
			low := loss()
			w.flat[at] = old
			want, got := (high-low)/(2*width), float64(grad.flat[at])
			if math.Abs(got-want) > 2e-3+5e-3*math.Abs(want) {
				t.Errorf("%s[%d]: gradient %g, differences give %g", s.name, i, got, want)
			}
			checked++
		}
	}
	if checked < 500 {
		t.Errorf("only %d gradients checked", checked)
	}
}

func TestSpecsFillTheWeights(t *testing.T) {
	offset := 0
	for _, s := range specs {
		if s.offset != offset || s.shape.Volume() != int64(s.size()) {
			t.Errorf("%s: offset %d and shape %v, want offset %d and %d elements", s.name, s.offset, s.shape, offset, s.size())
		}
		offset += s.size()
	}
	if offset != weightCount {
		t.Errorf("%d weights, want %d", offset, weightCount)
	}
}

func TestSharesAddUp(t *testing.T) {
	for world := 1; world <= 130; world++ {
		sum := 0
		for rank := range world {
			sum += share(batch, rank, world)
		}
		if sum != batch {
			t.Fatalf("world %d: %d samples a step", world, sum)
		}
	}
}

func TestEmbeddedImages(t *testing.T) {
	data := embedded()
	if len(data.test) != 360 || len(data.train) != 1437 {
		t.Errorf("%d test and %d training images, want 360 and 1437", len(data.test), len(data.train))
	}
	var labels [classes]int
	for _, one := range append(data.train[:len(data.train):len(data.train)], data.test...) {
		labels[one.label]++
	}
	for label, n := range labels {
		if n < 170 || n > 190 {
			t.Errorf("%d images of %d", n, label)
		}
	}
}

func TestParseRefusesDamage(t *testing.T) {
	good := strings.Repeat("0,", inputs) + "1\n"
	for name, text := range map[string]string{
		"too few images": good,
		"a field less":   good[2:],
		"a big pixel":    "17" + good[1:],
		"a bad label":    strings.Repeat("0,", inputs) + "10\n",
		"not a number":   "x" + good[1:],
	} {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		if _, err := z.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := parse(&b); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := parse(bytes.NewReader(compressed[:len(compressed)/2])); err == nil {
		t.Error("half of the file accepted")
	}
}
