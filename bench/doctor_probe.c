/* SPDX-License-Identifier: MIT
 *
 * A child process with a time limit, whose findings outlive it. */
#include "config.h"

#include "doctor.h"

#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { POLL_MS = 20 };

void probe_note(struct probe *probe, const char *format, ...)
{
    va_list arguments;
    if (probe->note_count == DOCTOR_NOTES) return;
    va_start(arguments, format);
    vsnprintf(probe->notes[probe->note_count++], sizeof probe->notes[0], format, arguments);
    va_end(arguments);
}

/* Never returns. What the driver writes goes to `said`; a crash leaves no core file behind. */
static void child_main(struct probe *probe, void (*child)(struct probe *, const void *), const void *user,
                       int said, double seconds)
{
    const struct rlimit no_core = {0, 0};
    setpgid(0, 0); /* compilers that drivers start end with us */
    setrlimit(RLIMIT_CORE, &no_core);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    alarm((unsigned)seconds + 10); /* should the parent be gone */
    int nothing = open("/dev/null", O_RDWR);
    if (nothing >= 0) {
        dup2(nothing, STDIN_FILENO);
        dup2(nothing, STDOUT_FILENO);
    }
    dup2(said, STDERR_FILENO);
    child(probe, user);
    probe->done = true;
    _exit(0); /* without the destructors of drivers: an application sees those at its own end */
}

/* Keeps the last line that is not empty. */
static void listen(struct probe *probe, int said, char *line, size_t bytes)
{
    char text[1024];
    for (ssize_t got; (got = read(said, text, sizeof text)) > 0;)
        for (ssize_t i = 0; i < got; i++) {
            size_t length = strlen(line);
            if (text[i] == '\n') {
                if (length) snprintf(probe->said, sizeof probe->said, "%s", line);
                line[0] = 0;
            } else if (text[i] && length + 1 < bytes) {
                line[length] = text[i];
                line[length + 1] = 0;
            }
        }
}

static void wait_for(struct probe *probe, pid_t child, int said, double seconds)
{
    double end = program_seconds() + seconds;
    char line[sizeof probe->said] = "";
    int result = 0;
    pid_t ended;
    struct pollfd waiting = {.fd = said, .events = POLLIN};
    while ((ended = waitpid(child, &result, WNOHANG)) == 0 && program_seconds() < end) {
        if (poll(&waiting, 1, POLL_MS) > 0 && !(waiting.revents & POLLIN)) usleep(1000 * POLL_MS); /* closed */
        listen(probe, said, line, sizeof line);
    }
    kill(-child, SIGKILL); /* it and whatever it started */
    if (ended == 0) {
        probe->hung = true;
        snprintf(probe->ended, sizeof probe->ended, "no end after %.0f s", seconds);
        while (waitpid(child, &result, 0) < 0 && errno == EINTR)
            ;
    } else if (WIFSIGNALED(result)) {
        probe->crashed = true;
        snprintf(probe->ended, sizeof probe->ended, "%s", strsignal(WTERMSIG(result)));
    } else if (!probe->done) {
        probe->crashed = true;
        snprintf(probe->ended, sizeof probe->ended, "exit with status %d", WEXITSTATUS(result));
    }
    listen(probe, said, line, sizeof line);
    if (line[0]) snprintf(probe->said, sizeof probe->said, "%s", line);
}

struct probe *probe_run(void (*child)(struct probe *, const void *), const void *user, double seconds)
{
    int said[2];
    struct probe *probe =
        mmap(NULL, sizeof *probe, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0); /* zeros */
    if (probe == MAP_FAILED) {
        program_error("no memory for a child process");
        return NULL;
    }
    if (pipe(said)) {
        program_error("no pipe for a child process: %s", strerror(errno));
        probe_release(probe);
        return NULL;
    }
    fcntl(said[0], F_SETFL, O_NONBLOCK);
    pid_t process = fork();
    if (process == 0) {
        close(said[0]);
        child_main(probe, child, user, said[1], seconds);
    }
    close(said[1]);
    if (process > 0) {
        setpgid(process, process); /* whoever comes first */
        wait_for(probe, process, said[0], seconds);
    } else {
        program_error("no child process: %s", strerror(errno));
        probe_release(probe);
        probe = NULL;
    }
    close(said[0]);
    return probe;
}

void probe_release(struct probe *probe)
{
    if (probe) munmap(probe, sizeof *probe);
}
