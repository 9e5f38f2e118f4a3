// Package planner decides which rank writes what ([Global]), what each rank reads ([Loader]),
// what it would read on another number of ranks ([NewPreview]), and when a checkpoint is
// begun, committed or aborted ([Coordinator]). Everything here is pure: events and times come
// in as values, plans and commands go out as values, and the callers execute them.
//
//	state dict ──Flatten──▶ names and paths
//	local plans ──Global──▶ layout ──Items(rank)──▶ what a rank writes
//	layout + wants ──Loader──▶ reads
//	layout + ranks ──NewPreview──▶ bytes by rank and file
//	log ──Coordinator.Apply──▶ state ──Tick(now)──▶ commands, next deadline
package planner

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/projections"
)

// MaxName bounds the name of a checkpoint in bytes, so that its encoded ID fits a file name.
const MaxName = 64

// CheckpointID returns the ID of the n-th save (from 1) under a name in an attempt. Every
// rank derives the same ID without communication.
func CheckpointID(name string, attempt, n int) string {
	id := fmt.Sprintf("%s.a%d", name, attempt)
	if n > 1 {
		id += fmt.Sprintf(".%d", n)
	}
	return id
}

// DefaultName returns the name of a save for which the user gave none.
func DefaultName(step int64) string { return fmt.Sprintf("step-%d", step) }

// ValidName returns an error for a checkpoint name that cannot be referred to later. The name
// of a file by itself is valid if both of its parts are.
func ValidName(name string) error {
	if dir, file, ok := projections.SplitFile(name); ok && len(name) <= MaxName {
		return errors.Join(validName(dir), validName(file))
	}
	return validName(name)
}

func validName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("checkpoint name is empty")
	case len(name) > MaxName:
		return fmt.Errorf("checkpoint name has %d bytes, at most %d are allowed", len(name), MaxName)
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return fmt.Errorf("checkpoint name %q has control characters", name)
	case strings.ContainsAny(name, "@/:"):
		return fmt.Errorf("checkpoint name %q has one of the characters @ / : that references use", name)
	case strings.Contains(name, projections.FileMark) || strings.HasPrefix(name, "~") || strings.HasSuffix(name, "~"):
		return fmt.Errorf("checkpoint name %q has %s in it, or begins or ends with ~: %s stands between the directory and the name of a file", name, projections.FileMark, projections.FileMark)
	case name == "latest":
		return fmt.Errorf("checkpoint name %q is taken by the reference run@latest", name)
	}
	return nil
}
