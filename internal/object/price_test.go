package object

import (
	"math"
	"testing"
)

func TestPrices(t *testing.T) {
	p := Standard()
	for _, wrong := range []string{"", "put", "put=", "put=x", "put=-1", "put=NaN", "put=Inf", "put=1,pet=2", "put=1,"} {
		if err := p.Set(wrong); err == nil {
			t.Errorf("%q: no error", wrong)
		}
	}
	if p != Standard() {
		t.Errorf("refused texts changed the prices to %v", &p)
	}
	if err := p.Set("month=0.0125,put=0.01"); err != nil || p != (Prices{Put: 0.01, Get: 0.0004, Month: 0.0125}) {
		t.Errorf("%v, %v", &p, err)
	}
	var again Prices
	if err := again.Set(p.String()); err != nil || again != p {
		t.Errorf("%v is read as %v, %v", &p, &again, err)
	}
	// A checkpoint of 1 TB in 30,000 parts is saved for $0.16 and kept for $23 a month.
	p = Standard()
	if saved := p.Puts(30_000 + 1_500); math.Abs(saved-0.1575) > 1e-9 {
		t.Error(saved)
	}
	if kept := p.Kept(1000 << 30); math.Abs(kept-23) > 1e-9 {
		t.Error(kept)
	}
	if loaded := p.Gets(60_000); math.Abs(loaded-0.024) > 1e-9 {
		t.Error(loaded)
	}
}
