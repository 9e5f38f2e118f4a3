package main

import (
	"slices"
	"strings"
)

// The flags that `go test` knows. Each is also known with the prefix "test." if the program of the tests gets it.
var (
	switches = strings.Fields("a artifacts asan benchmem buildvcs c cover failfast fullpath json linkshared modcacherw msan n race short trimpath v work x")
	valued   = strings.Fields(`C asmflags bench benchtime blockprofile blockprofilerate buildmode compiler count covermode
		coverpkg coverprofile cpu cpuprofile exec fuzz fuzzminimizetime fuzztime gccgoflags gcflags installsuffix ldflags
		list memprofile memprofilerate mod modfile mutexprofile mutexprofilefraction o outputdir overlay p parallel pgo
		pkgdir run shuffle skip tags timeout toolexec trace vet`)
)

// option is a flag that `go test` knows.
type option struct {
	name, value string
	args        []string // the flag as it was given: one argument or two
}

// arguments are those of `go test`, apart from -json.
type arguments struct {
	options  []option
	packages []string
	rest     []string // flags that only the program of the tests knows, and what follows them
}

// parse reads arguments by the rules of `go test`: its own flags may be before and after the packages. After a
// flag that it does not know, there is no package.
func parse(args []string) arguments {
	var a arguments
	listed, over, value := false, false, false // packages are being listed; their list is over; the last flag may lack its value
	for len(args) > 0 {
		arg := args[0]
		flag, isFlag := strings.CutPrefix(arg, "-")
		flag = strings.TrimPrefix(flag, "-")
		name, given, has := strings.Cut(flag, "=")
		known := strings.TrimPrefix(name, "test.")
		switch {
		case arg == "--" || arg == "-args" || arg == "--args":
			a.rest = append(a.rest, args...)
			return a
		case !isFlag || name == "":
			if over && !listed && !value {
				a.rest = append(a.rest, args...)
				return a
			}
			if over && !listed {
				a.rest = append(a.rest, arg)
			} else {
				a.packages = append(a.packages, arg)
				listed, over = true, true
			}
			args, value = args[1:], false
		case slices.Contains(switches, known) || slices.Contains(valued, known):
			n := 1
			if !has && slices.Contains(valued, known) && len(args) > 1 {
				given, n = args[1], 2
			}
			a.options = append(a.options, option{known, given, args[:n]})
			args, listed, value = args[n:], false, false
		default:
			a.rest = append(a.rest, arg)
			args, listed, over, value = args[1:], false, true, !has
		}
	}
	return a
}

// value returns the value of an option. The last one of its name counts.
func (a arguments) value(name string) string {
	for _, o := range slices.Backward(a.options) {
		if o.name == name {
			return o.value
		}
	}
	return ""
}

// given reports whether there is an option of a name.
func (a arguments) given(name string) bool {
	return slices.ContainsFunc(a.options, func(o option) bool { return o.name == name })
}

// with returns the arguments that test one package, with another value of an option.
func (a arguments) with(name, value, pkg string) []string {
	var args []string
	for _, o := range a.options {
		if o.name != name {
			args = append(args, o.args...)
		}
	}
	if value != "" {
		args = append(args, "-"+name+"="+value)
	}
	return append(append(args, pkg), a.rest...)
}
