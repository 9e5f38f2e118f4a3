package console

import (
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/bytesize"
)

// sizeText matches digits, perhaps with a fraction, and a unit: K, M, G or T,
// which is binary with iB and otherwise decimal.
var sizeText = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?)(?:([KMGT])(I?))?B?$`)

// ParseSize parses a number of bytes, from 1 to 1<<62-1. The unit's case does not
// matter.
func ParseSize(text string) (int64, error) {
	bad := fmt.Errorf("%q is not a size such as 500MB, 2GiB or 1000000", text)
	parts := sizeText.FindStringSubmatch(strings.ToUpper(text))
	if parts == nil {
		return 0, bad
	}
	n, ok := new(big.Rat).SetString(parts[1])
	if !ok {
		return 0, bad
	}
	base := int64(1000)
	if parts[3] != "" {
		base = 1024
	}
	for range strings.Index(" KMGT", parts[2]) {
		n.Mul(n, new(big.Rat).SetInt64(base))
	}
	whole := new(big.Int).Quo(n.Num(), n.Denom())
	if whole.Sign() <= 0 || whole.BitLen() > 62 {
		return 0, bad
	}
	return whole.Int64(), nil
}

// MaybeSize formats a size; it returns "" for an unknown one.
func MaybeSize(n *int64) string {
	if n == nil {
		return ""
	}
	return bytesize.Text(*n)
}

// When formats a time for people, in the local zone.
func When(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.DateTime)
}

// Roughly rounds a duration to the digits that people read.
func Roughly(d time.Duration) string {
	if d < 10*time.Second {
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// Number formats a metric's value exactly: with the fewest digits that identify
// it.
func Number(v any) string {
	if f, ok := v.(float64); ok {
		return strconv.FormatFloat(f, 'g', -1, 64)
	}
	if v == nil {
		return ""
	}
	return fmt.Sprint(v)
}

// Short returns the beginning of a digest, enough to recognize it.
func Short(digest string) string { return digest[:min(len(digest), 12)] }
