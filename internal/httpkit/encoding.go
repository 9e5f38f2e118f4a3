package httpkit

import (
	"strconv"
	"strings"
)

// TakesGzip reports whether a client accepts gzip, by its header Accept-Encoding.
func TakesGzip(accepts string) bool {
	takes := false
	for one := range strings.SplitSeq(accepts, ",") {
		name, parameter, _ := strings.Cut(one, ";")
		name = strings.ToLower(strings.TrimSpace(name))
		if name != "gzip" && name != "*" {
			continue
		}
		quality, found := strings.CutPrefix(strings.ToLower(strings.ReplaceAll(parameter, " ", "")), "q=")
		q, err := strconv.ParseFloat(quality, 64)
		takes = !found || err == nil && q > 0
		if name == "gzip" {
			return takes // it counts more than *
		}
	}
	return takes
}
