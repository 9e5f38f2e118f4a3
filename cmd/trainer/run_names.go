package main

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/ckptstore/ckptstore/projections"
)

// checkReference refuses what no store could resolve, before one is opened.
func checkReference(ref string) error {
	bad := func(why string) error { return fmt.Errorf("%w %q: %s", projections.ErrReference, ref, why) }
	if ref == "" {
		return bad("it is empty; write auto, none, require, RUN or RUN@NAME")
	}
	if strings.ContainsFunc(ref, unicode.IsControl) {
		return bad("it has a control character")
	}
	at := strings.LastIndexByte(ref, '@')
	what := ref[at+1:]
	if what == "" {
		return bad("nothing after the \"@\"; write RUN@NAME, RUN@latest or RUN@best:METRIC:min")
	}
	rest, best := strings.CutPrefix(what, "best:")
	if !best || at < 0 {
		return nil
	}
	colon := strings.LastIndexByte(rest, ':')
	if mode := rest[colon+1:]; colon < 1 || mode != "min" && mode != "max" {
		return bad("write RUN@best:METRIC:min or RUN@best:METRIC:max")
	}
	return nil
}
