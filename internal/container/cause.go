package container

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// EnvService is a variable that each container of Kubernetes has.
const EnvService = "KUBERNETES_SERVICE_HOST"

// EnvCause names the file for the cause of the end; [None] for no file.
const EnvCause = "CKPTSTORE_TERMINATION_LOG"

// None as the value of [EnvCause] switches the file off.
const None = "none"

const (
	defaultCause = "/dev/termination-log" // of a container of Kubernetes
	// maxCause is how many bytes of the file Kubernetes shows.
	maxCause = 4096
	// maxText is how many of them the text may have if output follows.
	maxText = maxCause / 2
)

// LeaveCause writes why the program ends to a file, for Kubernetes to show it as the
// message of the container: text, and the last output that led to it. The file is that of
// $CKPTSTORE_TERMINATION_LOG. Without the variable it is /dev/termination-log, if that
// exists and the program runs in Kubernetes, and otherwise LeaveCause does nothing. The
// file is overwritten, never made: the kubelet makes it. It receives 4096 bytes at most:
// of a longer text the beginning, of a longer output the end.
//
// The text becomes part of the pod's state, which more people may read than the
// container's output: the caller removes secrets.
func LeaveCause(getenv func(string) string, text, output string) error {
	return leaveCause(getenv, defaultCause, text, output)
}

// leaveCause is [LeaveCause] with the file of a pod.
func leaveCause(getenv func(string) string, ofPod, text, output string) error {
	path, named := getenv(EnvCause), true
	if path == "" {
		path, named = ofPod, false
	}
	if path == None || !named && getenv(EnvService) == "" {
		return nil
	}
	err := overwrite(path, bounded(text, output))
	if !named && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("leave the cause of the end for Kubernetes: %w; set %s to the container's terminationMessagePath, or to %s", err, EnvCause, None)
	}
	return nil
}

// overwrite replaces the content of a regular file.
func overwrite(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteString(text)
	}
	return errors.Join(err, f.Close())
}

// bounded joins text and output in maxCause bytes at most, as valid UTF-8.
func bounded(text, output string) string {
	text, output = strings.TrimSpace(strings.ToValidUTF8(text, "�")), strings.TrimRight(strings.ToValidUTF8(output, "�"), "\n")
	room := maxCause
	if output != "" {
		room = max(maxText, maxCause-len("\n")-len(output))
	}
	const mark = "…"
	if len(text) > room {
		text = strings.ToValidUTF8(text[:room-len(mark)], "") + mark
	}
	if output == "" {
		return text
	}
	if room = maxCause - len(text) - len("\n"); len(output) > room {
		output = mark + strings.ToValidUTF8(output[len(output)-room+len(mark):], "")
	}
	return text + "\n" + output
}
