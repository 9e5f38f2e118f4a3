package bytesize

import (
	"math"
	"testing"
)

func TestText(t *testing.T) {
	for n, want := range map[int64]string{
		-1: "-1 B", 0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1 << 20: "1.0 MiB", 3 << 30: "3.0 GiB", 1 << 40: "1.0 TiB", 1 << 50: "1.0 PiB",
		math.MaxInt64: "8.0 EiB",
	} {
		if got := Text(n); got != want {
			t.Errorf("%d bytes: %q, want %q", n, got, want)
		}
	}
	if got := Text(uint64(math.MaxUint64)); got != "16.0 EiB" {
		t.Errorf("the most bytes: %q", got)
	}
}
