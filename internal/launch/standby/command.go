package standby

import (
	_ "embed" // of the program that waits
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// waiting is the program that imports modules and waits for a rank.
//
//go:embed standby.py
var waiting string

// python matches the names of interpreters.
var python = regexp.MustCompile(`^python[0-9.]*$`)

// orderFD is the descriptor of a standby's order: the first one after those of its output.
const orderFD = "3"

// Command returns the command of a process that imports modules in advance and then becomes
// the Python program of a command, PYTHON [FLAG...] SCRIPT.py or -m MODULE, and its arguments. It
// returns false for other commands.
func Command(command, modules []string) (standby []string, ok bool) {
	if len(command) == 0 || !python.MatchString(filepath.Base(command[0])) {
		return nil, false
	}
	for at := 1; at < len(command); at++ {
		switch arg := command[at]; {
		case arg == "-X", arg == "-W", arg == "--check-hash-based-pycs":
			at++ // its value
		case arg == "-m" && at+1 < len(command):
			return wait(command[:at], modules, "-m", command[at+1:]), true
		case strings.HasPrefix(arg, "-X"), strings.HasPrefix(arg, "-W"):
		case strings.HasPrefix(arg, "-"):
			if strings.Trim(arg[1:], "bBdEIOPqsSuvx") != "" || arg == "-" {
				return nil, false
			}
		default:
			return wait(command[:at], modules, "-", command[at:]), strings.HasSuffix(arg, ".py")
		}
	}
	return nil, false
}

// wait adds the program that waits to an interpreter and its flags.
func wait(interpreter, modules []string, kind string, program []string) []string {
	return slices.Concat(interpreter, []string{"-c", waiting, orderFD, strings.Join(modules, ","), kind}, program)
}
