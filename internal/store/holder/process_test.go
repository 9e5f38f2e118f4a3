package holder

import (
	"encoding/json"
	"os/exec"
	"testing"
)

func TestDead(t *testing.T) {
	t.Parallel()
	me, err := This("job")
	if err != nil {
		t.Fatal(err)
	}
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	pid := gone.Process.Pid
	for _, c := range []struct {
		name   string
		change func(*Process)
		dead   bool
	}{
		{"this process", func(*Process) {}, false},
		{"an ended one", func(p *Process) { p.PID = pid }, true},
		{"an earlier one of the same number", func(p *Process) { p.Start = "1" }, true},
		// Nothing is known here about these processes.
		{"on another machine", func(p *Process) { p.PID, p.Host = pid, "far" }, false},
		{"before the machine was started", func(p *Process) { p.PID, p.Boot = pid, "other" }, false},
		{"in another container", func(p *Process) { p.PID, p.Space = pid, "pid:[1]" }, false},
		{"of a version that recorded less", func(p *Process) { p.PID, p.Space = pid, "" }, false},
	} {
		p := me
		c.change(&p)
		if got := p.Dead(me); got != c.dead {
			t.Errorf("%s is dead: %v", c.name, got)
		}
	}
	var back Process
	text, err := json.Marshal(me)
	if err == nil {
		err = json.Unmarshal(text, &back)
	}
	if err != nil || back != me {
		t.Errorf("%+v comes back as %+v, %v", me, back, err)
	}
}
