package httpkit

import "testing"

func TestTakesGzip(t *testing.T) {
	for accepts, want := range map[string]bool{
		"": false, "br": false, "gzip": true, "br, gzip": true, "*": true, "GZIP": true, "gzip;q=1": true, "gzip; q=0.5": true,
		"gzip;q=0": false, "gzip; q=0.000": false, "*;q=0": false, "*;q=0, gzip": true, "gzip;q=0, *": false, "gzip;q=x": false, "xgzip": false,
	} {
		if got := TakesGzip(accepts); got != want {
			t.Errorf("%q: %v, want %v", accepts, got, want)
		}
	}
}
