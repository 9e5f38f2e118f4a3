package console

import "testing"

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "1000000": 1e6, "5B": 5, "500MB": 5e8, "500mb": 5e8, "2GiB": 2 << 30, "2gib": 2 << 30, "2Gi": 2 << 30,
		"1.5k": 1500, "1.5KiB": 1536, "3t": 3e12, "0.5K": 500, "4611686018427387903": 1<<62 - 1, "9007199254740993": 1<<53 + 1,
	} {
		if got, err := ParseSize(text); err != nil || got != want {
			t.Errorf("%s: %d, want %d: %v", text, got, want, err)
		}
	}
	for _, text := range []string{
		"", "nan", "NaN", "NANB", "inf", "Infinity", "+inf", "-1", "-1GB", "+1", "0", "0GB", "0.5", "1e9", "0x10", "1_000", "1,5GB", ".5GB", "5.GB",
		"B", "iB", "5iB", "5X", "5KM", "5BB", "5 GB", " 5", "4611686018427387904", "9999999999TB", "1" + string(make([]byte, 3)),
	} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
}
