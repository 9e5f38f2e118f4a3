// Package bytesize formats numbers of bytes for people.
package bytesize

import "fmt"

// Text formats a number of bytes in the largest unit of 1024 that is not larger, with one
// digit after the point: "512 B", "1.5 KiB", "2.0 GiB".
func Text[N int64 | uint64](n N) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	value, exp := float64(n), 0
	for value >= unit && exp < 6 {
		value /= unit
		exp++
	}
	return fmt.Sprintf("%.1f %ciB", value, " KMGTPE"[exp])
}
