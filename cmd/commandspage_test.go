package cmd_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestCommandsPage holds docs/reference/commands.md to the help of the commands. With
// -update it writes the page.
func TestCommandsPage(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString("# Commands\n\nThe help of every command, as it prints it. This page is written by\n`go test ./cmd -run TestCommandsPage -update`.\n")
	for _, program := range []string{"ckptstore", "trainer"} {
		writeHelp(t, &b, program)
	}
	page := filepath.Join("..", "docs", "reference", "commands.md")
	if *update {
		if err := os.WriteFile(page, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if string(have) != b.String() {
		t.Errorf("%s differs from the help of the commands: run `go test ./cmd -run TestCommandsPage -update`", page)
	}
}

var subcommand = regexp.MustCompile(`(?m)^  (\S+) {2,}\S`)

// writeHelp writes the help of a command, then of the commands below it.
func writeHelp(t *testing.T, b *strings.Builder, command ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), command[0], append(command[1:], "--help")...)
	cmd.Env = append(os.Environ(), "COLUMNS=100", "HOME=/nonexistent")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v --help: %v", command, err)
	}
	level := "##"
	if len(command) > 1 {
		level = "###"
	}
	b.WriteString("\n" + level + " " + strings.Join(command, " ") + "\n\n```text\n" + strings.TrimSpace(string(out)) + "\n```\n")
	_, list, found := strings.Cut(string(out), "Commands:\n")
	if !found {
		return
	}
	list, _, _ = strings.Cut(list, "\nFlags:")
	for _, m := range subcommand.FindAllStringSubmatch(list, -1) {
		if m[1] != "help" && m[1] != "completion" {
			writeHelp(t, b, append(append([]string{}, command...), m[1])...)
		}
	}
}
