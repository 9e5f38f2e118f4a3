package store

import (
	"fmt"
	"strings"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrLocation says that a location is neither a directory nor the URL of a
// server that can hold a log.
var ErrLocation = problem.New(problem.Invalid, "bad store location")

// IsURL reports whether a location names a server rather than a directory.
func IsURL(location string) bool {
	_, isURL, err := parseLocation(location)
	return isURL && err == nil
}

// parseLocation is a directory as it is, or a list of URLs with their schemes
// in lower case. What only looks like a URL is an error: as a directory it
// would be made where nobody looks for it.
func parseLocation(location string) (normal string, isURL bool, err error) {
	head, after, ok := strings.Cut(location, ":")
	if !ok || !strings.HasPrefix(after, "/") || strings.ContainsAny(head, "/.") {
		return location, false, nil // a directory, perhaps of a strange name
	}
	var list []string
	for _, text := range strings.Split(location, ",") {
		text = strings.TrimSpace(text)
		scheme, rest, ok := strings.Cut(text, ":")
		if !ok || !strings.HasPrefix(rest, "/") {
			list = append(list, text) // HOST:PORT, after a first URL
			continue
		}
		scheme = strings.ToLower(scheme)
		if !strings.HasPrefix(rest, "//") || scheme != "nats" && scheme != "tls" {
			return "", true, fmt.Errorf("%w %s: it looks like a URL, and those that work are nats://HOST:PORT and tls://HOST:PORT; a directory of such a name is written ./NAME",
				ErrLocation, jetlog.Redacted(location))
		}
		list = append(list, scheme+":"+rest)
	}
	return strings.Join(list, ","), true, nil
}
